"""Charts as records, and the only code that draws them: as SVG, PNG and text here, in a page by `memkit.report`."""
