for (const [number, figure] of document.querySelectorAll(".alloc").entries()) {
  const data = JSON.parse(figure.querySelector("script").textContent), words = data.words;
  const area = figure.querySelector(".field"), svg = area.querySelector("svg"), tip = area.querySelector(".tip");
  const part = name => figure.querySelector("." + name);
  const say = (key, values = {}) => words[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
  const count = n => n.toLocaleString("en");
  const exact = n => count(n) + " B";
  const size = n => {
    let unit = 0;
    for (; n >= 1024 && unit < 4; unit++) n /= 1024;
    return (unit ? n.toFixed(n < 9.995 ? 2 : n < 99.95 ? 1 : 0) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
  };
  const add = (parent, tag, text = "", name = "") => {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    if (name) made.className = name;
    parent.append(made);
    return made;
  };
  const sized = (parent, tag, bytes) => { add(add(parent, tag, "", "n"), "data", size(bytes)).title = exact(bytes); };
  const [parents, framesOf] = data.nodes, kids = parents.map(() => []), tops = [];
  parents.forEach((parent, node) => (parent < 0 ? tops : kids[parent]).push(node));
  const frame = node => data.frames[framesOf[node]];
  const share = label => Math.max(...data.labels[label].sums[0].map(sums => sums[data.scopes[0].events.indexOf(data.peak)])) / data.peakBytes;
  const told = Object.keys(data.labels).find(label => share(label) < .9);  // a single band for everything is useless
  const state = {scope: 0, label: told ?? Object.keys(data.labels)[0], column: 0, band: null, node: -1};
  const scope = () => data.scopes[state.scope], group = () => data.labels[state.label];
  const bands = () => {  // the named ones, and the rest of the total
    const named = group().sums[state.scope].map((sums, i) => ({name: group().names[i], sums, band: i}));
    const rest = scope().totals.map((total, c) => named.reduce((left, each) => left - each.sums[c], total));
    return rest.some(each => each > 0) ? [...named, {name: say("others"), sums: rest, band: named.length}] : named;
  };
  const color = band => "var(--a" + (band < group().names.length ? band : "x") + ")";
  const when = c => {
    const {events, seconds} = scope();
    const at = say("event", {event: count(events[c] + 1), count: count(data.numEvents)});
    return seconds ? at + ", " + seconds[c].toFixed(seconds[seconds.length - 1] < 10 ? 4 : 1) + " s" : at;
  };
  const peakColumn = () => Math.max(0, scope().events.indexOf(data.peak));

  const draw = () => {
    const {events, totals, lows, seconds} = scope(), width = events.length, top = Math.max(...totals, 1) * 1.04;
    const y = bytes => (1000 - 1000 * bytes / top).toFixed(1);
    const steps = values => values.map((value, c) => "L" + c + "," + y(value) + "H" + (c + 1)).join("");
    const below = new Array(width).fill(0);
    let paths = "";
    for (const {sums, band} of bands()) {
      const under = below.slice();
      sums.forEach((bytes, c) => { below[c] += bytes; });
      const back = under.map((value, c) => "L" + (c + 1) + "," + y(value) + "H" + c).reverse().join("");
      const faded = state.band === null || state.band === band ? "" : " class=\"faded\"";
      paths += "<path" + faded + " style=\"fill:" + color(band) + "\" d=\"M0," + y(under[0]) + steps(below) + back + "Z\"/>";
    }
    paths += "<path class=\"low\" d=\"M0," + y(lows[0]) + steps(lows) + "\"/>";
    svg.setAttribute("viewBox", "0 0 " + width + " 1000");
    svg.innerHTML = paths;
    const ys = part("ys"), xs = part("xs");
    ys.textContent = xs.textContent = "";
    const unit = 1024 ** Math.floor(Math.log2(top) / 10), round = 10 ** Math.floor(Math.log10(top / unit));
    const step = [1, 2, 5, 10].map(each => each * round / 5).find(each => top / unit / each <= 6) * unit;
    for (let tick = 0; tick < top; tick += step) add(ys, "span", size(tick)).style.top = y(tick) / 10 + "%";
    for (const share of [0, .25, .5, .75, 1]) {
      const c = Math.round(share * (width - 1));
      const tick = add(xs, "span", seconds ? seconds[c].toPrecision(3) + " s" : count(events[c] + 1));
      tick.style.left = 100 * share + "%";
      tick.className = share === 0 ? "first" : share === 1 ? "last" : "";
    }
    for (const old of area.querySelectorAll(".flag")) old.remove();
    const flag = (c, text, name) => {
      const made = add(area, "span", text, "flag " + name + (c > .6 * width ? " left" : ""));
      made.style.left = 100 * (c + .5) / width + "%";
    };
    flag(peakColumn(), say("peak", {size: size(data.peakBytes)}), "peak");
    for (const [event] of data.shortages.slice(-20)) {
      const c = events.findIndex(each => each >= event);
      if (event >= events[0] && event <= scope().lastEvent) flag(c < 0 ? width - 1 : c, say("shortage"), "oom");
    }
  };

  const live = () => {  // the individually listed blocks that are live now, of the chosen band and stack
    const event = scope().events[state.column], found = [];
    for (let i = 0; i < data.births.length; i++) {
      if (data.births[i] > event || data.deaths[i] <= event) continue;
      if (state.band !== null && group().ofOrigin[data.owners[i]] !== state.band) continue;
      found.push(i);
    }
    return found;
  };
  const isUnder = (i, node) => {
    for (let at = data.leaves[data.owners[i]]; at >= node; at = parents[at]) if (at === node) return true;
    return node < 0;
  };

  const tell = () => {
    const c = state.column, {totals, counts, reserved} = scope(), all = bands();
    const values = {size: size(totals[c]), exact: exact(totals[c]), count: count(counts[c]), when: when(c)};
    let text = say(scope().events[c] === data.peak ? "at_peak" : "at_moment", values);
    if (reserved) text += " " + say("reserved", {size: size(reserved[c]), share: (100 * (1 - totals[c] / reserved[c])).toFixed(0)});
    part("moment").textContent = text;
    const rows = part("groups").tBodies[0];
    rows.textContent = "";
    for (const {name, sums, band} of all.slice().sort((a, b) => b.sums[c] - a.sums[c])) {
      const row = add(rows, "tr"), head = add(row, "th");
      head.scope = "row";
      add(head, "i").style.background = color(band);
      const pick = add(head, "button", name);
      pick.type = "button";
      pick.ariaPressed = String(state.band === band);
      pick.addEventListener("click", () => choose({band: state.band === band ? null : band, node: -1}, pick));
      sized(row, "td", sums[c]);
      add(row, "td", (100 * sums[c] / (totals[c] || 1)).toFixed(1) + " %", "n");
    }
    area.setAttribute("aria-valuenow", c);
    area.setAttribute("aria-valuemax", totals.length - 1);
    area.setAttribute("aria-valuetext", text);
    const rule = area.querySelector(".now");
    rule.style.left = 100 * (c + .5) / totals.length + "%";
    const chosen = state.band === null ? totals[c] : all.find(each => each.band === state.band).sums[c];
    const blocks = live();
    flame(blocks, chosen);
    list(blocks.filter(i => isUnder(i, state.node)));
  };

  const flame = (blocks, whole) => {
    const box = part("flame"), held = new Float64Array(parents.length);
    box.textContent = "";
    let known = 0, bare = 0;
    for (const i of blocks) {
      known += data.sizes[i];
      if (data.leaves[data.owners[i]] < 0) bare += data.sizes[i];
      for (let node = data.leaves[data.owners[i]]; node >= 0; node = parents[node]) held[node] += data.sizes[i];
    }
    const root = state.node < 0 ? whole : held[state.node];
    let depth = 0, cells = 0;
    const cell = (name, bytes, left, level, text, pick) => {
      const made = add(box, "button", bytes > root / 40 ? name : "");
      made.type = "button";
      made.title = name + "\n" + size(bytes) + " (" + exact(bytes) + ")\n" + text;
      made.tabIndex = cells++ ? -1 : 0;
      made.style.cssText = "left:" + 100 * left / root + "%;width:" + 100 * bytes / root + "%;top:" + 1.75 * level + "rem";
      made.addEventListener("click", pick);
      depth = Math.max(depth, level);
      return made;
    };
    const most = node => kids[node].reduce((best, kid) => (held[kid] > (best < 0 ? 0 : held[best]) ? kid : best), -1);
    const place = (node, left, level) => {
      const run = [node];
      for (let kid = most(node); kid >= 0 && held[kid] === held[node]; kid = most(kid)) run.push(kid);
      const last = run[run.length - 1], code = run.filter(each => frame(each).includes(".py:"));
      const name = frame(code.length ? code[code.length - 1] : last);
      cell(name, held[node], left, level, run.map(frame).join("\n"), () => choose({node: state.node === last ? -1 : last}, box));
      let at = left;
      for (const kid of kids[last].filter(each => held[each]).sort((a, b) => held[b] - held[a])) {
        if (held[kid] > root / 250 && level < 24 && cells < 400) place(kid, at, level + 1);
        at += held[kid];
      }
    };
    const title = state.node < 0 ? (state.band === null ? say("all_stacks") : (bands().find(each => each.band === state.band).name)) : frame(state.node);
    cell(title + " · " + size(root), root, 0, 0, say("back"), () => choose(state.node < 0 ? {band: null} : {node: -1}, box)).className = "root";
    let at = 0;
    for (const node of (state.node < 0 ? tops : kids[state.node]).filter(each => held[each]).sort((a, b) => held[b] - held[a])) {
      if (held[node] > root / 250) place(node, at, 1);
      at += held[node];
    }
    if (state.node < 0) {  // blocks without a stack, and blocks known only as a sum
      for (const [name, bytes] of [["bare", bare], ["small", whole - known]]) {
        if (bytes > root / 250) cell(say(name), bytes, at, 1, say(name + "_text"), () => {}).classList.add("small");
        at += bytes;
      }
    }
    box.style.height = 1.75 * (depth + 1) + "rem";
  };

  const list = blocks => {
    const rows = part("blocks").tBodies[0], heads = [...part("blocks").tHead.rows[0].cells].map(each => each.textContent);
    rows.textContent = "";
    for (const i of blocks.sort((a, b) => data.sizes[b] - data.sizes[a]).slice(0, 12)) {
      const row = add(rows, "tr"), head = add(row, "th");
      head.scope = "row";
      const owner = data.owners[i], stack = [];
      for (let node = data.leaves[owner]; node >= 0; node = parents[node]) stack.push(frame(node));
      if (stack.length) {
        const fold = add(head, "details");
        add(fold, "summary", data.lines[owner]);
        const frames = add(fold, "ol");
        for (const each of stack) add(frames, "li", each);
      } else {
        head.textContent = data.lines[owner];
      }
      sized(row, "td", data.sizes[i]);
      add(row, "td", data.births[i] < 0 ? say("before") : count(data.births[i] + 1), "n");
      add(row, "td", data.deaths[i] >= data.numEvents ? say("never") : count(data.deaths[i] + 1), "n");
      [...row.cells].forEach((each, column) => { each.dataset.head = heads[column]; });
    }
  };

  const choose = (change, focus = null) => {
    const name = focus && focus !== part("flame") ? focus.textContent : "";
    Object.assign(state, change);
    draw();
    tell();
    if (name) [...figure.querySelectorAll(".groups button")].find(each => each.textContent === name)?.focus();
    else if (focus) focus.querySelector("button")?.focus();
  };
  const options = (name, names, chosen, pick) => {
    const box = part(name);
    names.forEach(([value, text]) => {
      const label = add(box, "label"), input = document.createElement("input");
      Object.assign(input, {type: "radio", name: name + number, checked: value === chosen});
      input.addEventListener("change", () => pick(value));
      label.append(input, text);
    });
    if (names.length < 2) box.hidden = true;
  };
  options("by", Object.keys(data.labels).map(name => [name, words["label_" + name]]), state.label, label => choose({label, band: null, node: -1}));
  options("span", data.scopes.map((each, i) => [i, i ? say("closer", {count: count(Math.round(data.numEvents / (each.events.at(-1) - each.events[0] + 1)))}) : say("whole")]), state.scope, index => {
    state.scope = index;
    choose({column: peakColumn(), node: -1});
  });

  const bandAt = (c, bytes) => {
    let sum = 0;
    for (const each of bands()) if ((sum += each.sums[c]) >= bytes) return each;
    return null;
  };
  const point = event => {
    const box = area.getBoundingClientRect(), width = scope().events.length;
    const c = Math.max(0, Math.min(width - 1, Math.floor(width * (event.clientX - box.left) / box.width)));
    const bytes = (1 - (event.clientY - box.top) / box.height) * 1.04 * Math.max(...scope().totals, 1);
    return [c, bandAt(c, bytes)];
  };
  area.addEventListener("pointermove", event => {
    const [c, band] = point(event), left = (c + .5) / scope().events.length;
    const total = size(scope().totals[c]) + " (" + exact(scope().totals[c]) + ")";
    tip.textContent = (band ? band.name + ": " + size(band.sums[c]) + " (" + exact(band.sums[c]) + ") · " : "") + say("total") + " " + total + " · " + when(c);
    tip.style.left = left < .5 ? 100 * left + "%" : "auto";
    tip.style.right = left < .5 ? "auto" : 100 * (1 - left) + "%";
    area.classList.add("on");
  });
  area.addEventListener("pointerleave", () => area.classList.remove("on"));
  area.addEventListener("click", event => {
    const [column, band] = point(event);
    choose({column, band: band && band.band !== state.band ? band.band : null, node: -1});
  });
  area.addEventListener("keydown", event => {
    const last = scope().events.length - 1, c = state.column, shown = bands().map(each => each.band);
    const next = by => shown[shown.indexOf(state.band) + by] ?? null;
    const to = {ArrowRight: c + 1, ArrowLeft: c - 1, PageUp: c + 20, PageDown: c - 20, Home: 0, End: last, p: peakColumn()}[event.key];
    if (to !== undefined) choose({column: Math.max(0, Math.min(last, to))});
    else if (event.key === "ArrowUp") choose({band: next(1), node: -1});
    else if (event.key === "ArrowDown") choose({band: state.band === null ? shown.at(-1) : next(-1), node: -1});
    else if (event.key === "Escape") choose({band: null, node: -1});
    else return;
    event.preventDefault();
  });
  part("flame").addEventListener("keydown", event => {
    const cells = [...event.currentTarget.children], by = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") choose({node: -1}, event.currentTarget);
    if (!by) return;
    event.preventDefault();
    cells[Math.max(0, Math.min(cells.length - 1, cells.indexOf(document.activeElement) + by))].focus();
  });
  figure.classList.add("ready");
  choose({column: peakColumn()});
}
