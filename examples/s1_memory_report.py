"""S1: from a run's memory events to a report, and two runs compared.

A text-to-video pipeline in the form of Wan2.1's, small enough for a laptop: a text encoder, a video decoder and a
diffusion transformer are loaded, a text is encoded, some denoising steps are taken. It is watched twice: with all parts
loaded before the first is used, and with the text encoder dropped before the next is loaded. The first program's own
log, with the real sizes of Wan2.1 on a GPU, becomes a report by the same call.

Run: python examples/s1_memory_report.py [--smoke]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import memkit as mk
from memkit.report.nodes import Paragraph, Section

WIDTH = 256
# A log as the first program wrote it. Two loadings and all but two steps are not in it.
WAN_EVENTS = [
    {"event": "init", "peak_memory": 0},
    {"event": "t5_loaded", "peak_memory": 11_362_869_248},
    {"event": "model_loaded", "peak_memory": 24_824_987_648},
    {"event": "step_1", "incremental_memory": 35_122_176},
    {"event": "step_2", "incremental_memory": 35_122_176},
    {"event": "inference_end", "peak_memory": 24_860_109_824},
]


def transformer(num_blocks: int) -> nn.Module:
    block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(block, num_blocks, enable_nested_tensor=False).eval()


def run(log: Path, num_steps: int, *, drop_text_encoder: bool) -> Tensor:
    """Encode the text at the head of this file and denoise a video for it; the log has an event after each stage."""
    torch.manual_seed(0)
    text = torch.tensor([list(__doc__.encode()[:512])])
    with mk.MemoryManager("cpu", log=log) as memory, memory.track() as tracker, torch.no_grad():
        memory.mark("init")
        text_encoder = nn.Sequential(nn.Embedding(256, WIDTH), transformer(8))
        memory.mark("t5_loaded")
        if drop_text_encoder:
            condition, text_encoder = text_encoder(text), None
            memory.mark("text_encoded")
        decoder = nn.Sequential(nn.ConvTranspose3d(WIDTH, 64, 4, 4), nn.SiLU(), nn.Conv3d(64, 3, 3, padding=1))
        memory.mark("vae_loaded")
        denoiser = transformer(4)
        memory.mark("dit_loaded")
        memory.mark("model_loaded")
        if not drop_text_encoder:
            condition = text_encoder(text)
        memory.mark("forward_pass")
        latent = torch.randn(1, 4 * 8 * 8, WIDTH)
        for step in range(1, num_steps + 1):
            found = denoiser(torch.cat([latent, condition], 1))[:, : latent.shape[1]]
            latent = latent + (found - latent) / (num_steps - step + 1)
            memory.mark(f"step_{step}")
        video = decoder(latent.transpose(1, 2).reshape(1, WIDTH, 4, 8, 8))
        memory.mark("inference_end", note={"peak_by_category": tracker.peak_by_category})
    return video


def about_the_text(log, language: str) -> Section | None:
    """A section of one's own: any function of the log and the language; None leaves it out."""
    if language != "en":
        return None
    return Section("Text", (Paragraph(f"{len(log.events)} events of a run that encoded the head of this example."),))


def print_part(report: Path, title: str) -> None:
    lines = report.read_text("utf-8").splitlines()
    start = lines.index(title)
    print("", *lines[start : start + 13], sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two denoising steps")
    num_steps = 2 if parser.parse_args().smoke else 10
    folder = Path(tempfile.mkdtemp())

    for name, drop_text_encoder in (("before", False), ("after", True)):
        video = run(folder / f"{name}.jsonl", num_steps, drop_text_encoder=drop_text_encoder)
        print(f"{name}: a video of {tuple(video.shape)}")
    before, after = (mk.report.read_memory_events(folder / f"{name}.jsonl") for name in ("before", "after"))
    (folder / "memory_events.json").write_text(json.dumps(WAN_EVENTS))
    wan = mk.report.read_memory_events(folder / "memory_events.json")
    for suffix in ("html", "md", "txt"):
        mk.write_report(after, folder / f"report.{suffix}", baseline=before, sections=[about_the_text])
        mk.write_report(wan, folder / f"wan.{suffix}")
    print(*(f"{path.stat().st_size:>8,} B  {path}" for path in sorted(folder.glob("*.*"))), sep="\n")
    print_part(folder / "report.txt", "Compared with the baseline")
    print_part(folder / "wan.txt", "Components and their shares")


if __name__ == "__main__":
    main()
