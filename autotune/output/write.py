"""All files of a finished run, each whole or not at all."""

from pathlib import Path

from autotune.output.config_file import config_text
from autotune.output.files import CONFIG, LOOP, REPORT_HTML, REPORT_MD, OutFolder, sign, write_whole
from autotune.output.loop import render_loop
from autotune.output.report import render_reports
from autotune.summary import Summary


def write_all(summary: Summary, folder: OutFolder | str | Path) -> dict[str, Path]:
    """Write config.json, train.py, report.html and report.md; return file name → path.

    `trials.jsonl` and `study.db` grow while a run goes on, and are not written here.

    Raises:
        OutFolderUnusable: If the folder cannot be written to, or holds a file of one of these
            names that is not ours.
    """
    out = folder if isinstance(folder, OutFolder) else OutFolder(folder)
    html, markdown = render_reports(summary)
    texts = {
        LOOP: sign(LOOP, render_loop(summary, out_folder=out.path)),
        REPORT_HTML: sign(REPORT_HTML, html),
        REPORT_MD: sign(REPORT_MD, markdown),
        CONFIG: config_text(summary),  # last: where it is, the others are
    }
    for name, text in texts.items():
        write_whole(out.file(name), text)
    return {name: out.file(name) for name in texts}
