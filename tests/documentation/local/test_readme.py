"""The example of README.md runs as it stands there and prints what it says."""

import re
from pathlib import Path

README = (Path(__file__).parents[3] / "README.md").read_text()


def test_the_example_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (promised,) = re.findall(r"```text\n(placed .*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    placed, *losses = capsys.readouterr().out.splitlines()
    first, *lines = promised.splitlines()
    assert placed.startswith(first.removesuffix("..."))
    assert len(losses) == 20
    for line in lines:
        if line != "...":
            step, loss = line.split()
            said = losses[int(step) - 1].split()
            # other processors round otherwise
            assert said[0] == step and abs(float(said[1]) - float(loss)) < 0.01
