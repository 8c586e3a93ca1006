"""The examples and the papers name commands, options and files that exist; shells and YAML
parse. What runs them is not here to ask."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from roadtrain import cli
from roadtrain.config.job import load_job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAPERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def check_roadtrain(words):
    """`roadtrain COMMAND ...` as the command line would take it."""
    words = words[words.index("roadtrain") + 1 :]
    several = any(name.startswith(f"{words[0]} ") for name in cli.COMMANDS)
    name, rest = (" ".join(words[:2]), words[2:]) if several else (words[0], words[1:])
    cli.parse(name, rest)


@pytest.mark.parametrize("name", ["moe.toml", "stdlib.toml"])
def test_jobs_load(name):
    assert load_job(EXAMPLES / name).run.steps


def test_the_slurm_script_is_bash_and_calls_what_exists():
    path = EXAMPLES / "cluster" / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text().replace("\\\n", " ")
    calls = [
        line for line in text.splitlines() if "roadtrain serve" in line or "roadtrain train" in line
    ]
    assert len(calls) == 2
    for line in calls:
        check_roadtrain(shlex.split(line.rstrip(" &")))


def test_the_kubernetes_objects_fit_each_other():
    service, servers, workers = yaml.safe_load_all(
        (EXAMPLES / "cluster" / "kubernetes.yaml").read_text()
    )
    assert [o["kind"] for o in (service, servers, workers)] == ["Service", "StatefulSet", "Job"]
    for owner in (servers, workers):
        pod = owner["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        check_roadtrain([str(word) for word in container["command"]])
        volumes = {v["name"] for v in pod["spec"]["volumes"]} | {
            claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", ())
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    addresses = next(
        w
        for w in workers["spec"]["template"]["spec"]["containers"][0]["command"]
        if "servers.addresses" in w
    )
    wanted = [
        f"{servers['metadata']['name']}-{i}.{service['metadata']['name']}:7000"
        for i in range(servers["spec"]["replicas"])
    ]
    assert addresses == f"--servers.addresses={','.join(wanted)}"


def test_readme_fits_its_frame():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", PAPERS)
def test_papers_link_to_what_is_there(name):
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text())
    assert not [link for link in links if not (ROOT / link).exists()]


def test_readme_names_commands_that_exist():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`roadtrain ([a-z][a-z-]+)", text))
    known = {name.split()[0] for name in cli.COMMANDS}
    assert named and named <= known


def commands_of(path):
    """The calls of `roadtrain` in the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines]
    names = [[Path(word).name if "/" in word else word for word in call] for call in calls]
    return [call for call in names if "roadtrain" in call]


PAGES = [ROOT / "README.md", ROOT / "docs/quickstart.md", *sorted(ROOT.glob("docs/guides/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_commands_in_the_docs_parse(page):
    for call in commands_of(page):
        call = call[:-1] if call[-1] == "&" else call
        check_roadtrain(call[call.index("roadtrain") :])


def test_the_docs_have_commands():
    assert sum(len(commands_of(page)) for page in PAGES) >= 15
