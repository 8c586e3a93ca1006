"""The example of README.md runs as written and prints the documented output."""

import re
from pathlib import Path

README = (Path(__file__).parents[3] / "README.md").read_text()


def test_the_example_runs_and_prints_the_documented_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (documented,) = re.findall(r"```text\n(placed .*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    placed, *losses = capsys.readouterr().out.splitlines()
    first, *lines = documented.splitlines()
    assert placed.startswith(first.removesuffix("..."))
    assert len(losses) == 20
    for line in lines:
        if line != "...":
            step, loss = line.split()
            words = losses[int(step) - 1].split()
            # other processors round differently
            assert words[0] == step and abs(float(words[1]) - float(loss)) < 0.01
