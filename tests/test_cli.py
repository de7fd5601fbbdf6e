"""The command line, run as the process that a user starts."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist.cli import main
from hf_dist.presets.catalogue import PRESETS, ds_config, load_json

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hf_dist.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_help_is_quick_and_imports_neither_torch_nor_deepspeed():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = run("--help")
        seconds.append(time.perf_counter() - start)
    assert result.returncode == 0 and "presets" in result.stdout
    # The best of three: the machine may be busy, and the claim is about this program.
    assert min(seconds) < 0.5
    code = (
        "import sys; from hf_dist.cli import main\n"
        "try: main(['presets', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'deepspeed', 'rich'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_the_table_has_every_preset(capsys):
    main(["presets"])
    table = capsys.readouterr().out
    assert all(name in table for name in PRESETS)
    assert "optimizer to nvme" in table


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "none"])
def test_show_prints_json_that_is_the_preset(capsys, name):
    main(["presets", "show", name])
    assert json.loads(capsys.readouterr().out) == ds_config(name)


@pytest.mark.parametrize(("name", "said"), [("none", "without DeepSpeed"), ("zero4", "expected one of")])
def test_show_refuses_what_has_no_json(capsys, name, said):
    with pytest.raises(SystemExit) as exit:
        main(["presets", "show", name])
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1


def test_write_then_check_then_a_changed_byte(tmp_path, capsys):
    folder = tmp_path / "configs"
    main(["presets", "write", str(folder)])
    assert load_json(folder / "zero2.json") == ds_config("zero2")
    assert f"{folder}/zero2.json" in (folder / "accelerate" / "zero2.yaml").read_text()
    main(["presets", "write", str(folder), "--check"])
    capsys.readouterr()

    with (folder / "zero2.json").open("a") as file:
        file.write(" ")
    with pytest.raises(SystemExit) as exit:
        main(["presets", "write", str(folder), "--check"])
    assert exit.value.code == 1
    assert "zero2.json is out of date" in capsys.readouterr().out
    main(["presets", "write", str(folder)])
    assert capsys.readouterr().out == f"wrote {folder}/zero2.json\n"


def test_check_names_file_key_and_mend(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(ds_config("zero1")))
    bad.write_text('{"grad_clipping": 1, "zero_optimization": {"stage": 2}}')
    main(["presets", "check", str(good)])
    assert "nothing wrong" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit:
        main(["presets", "check", str(good), str(bad)])
    assert exit.value.code == 1
    out = capsys.readouterr().out
    assert f"{bad}: error: grad_clipping: " in out and "use gradient_clipping" in out


def test_check_goes_on_after_a_file_that_is_no_json(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(ds_config("zero1")))
    bad.write_text("{")
    with pytest.raises(SystemExit):
        main(["presets", "check", str(bad), str(good)])
    out = capsys.readouterr().out
    assert "is not JSON" in out and f"{good}: nothing wrong" in out


def test_a_warning_alone_does_not_fail(tmp_path, capsys):
    file = tmp_path / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    main(["presets", "check", str(file)])
    assert "warning: zero_optimization.stage: is 2, but" in capsys.readouterr().out
