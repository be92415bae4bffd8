"""A wrong setting of the executor is named, with a remedy, before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from executor.errors import CacheFileError, ModelError
from executor.preflight import check, check_device, computes_on_gpus
from executor.settings import settings_from
from tests.support.patience import patience


def refused(**settings: object) -> str:
    """What is said about these settings."""
    given = {f"KVKEEP_EXECUTOR_{name.upper()}": str(value) for name, value in settings.items()}
    with pytest.raises((ModelError, CacheFileError)) as said:
        check(settings_from(given), {})
    return str(said.value)


def model(folder: Path, configuration: str = "{}") -> Path:
    """A folder that is a model as far as is looked."""
    folder.mkdir()
    (folder / "config.json").write_text(configuration)
    return folder


def test_a_model_that_may_be_one_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for accepted in (model(tmp_path / "model"), tmp_path / "model.gguf", "owner/name"):
        check(settings_from({"KVKEEP_EXECUTOR_MODEL": str(accepted)}), {})


def test_a_model_that_does_not_exist_is_named_with_its_variable(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    for field, others in (("model", {}), ("draft_model", {"max_drafts": 4, "model": model(tmp_path / "model")})):
        said = refused(**others, **{field: nothing})
        assert said.startswith(f"KVKEEP_EXECUTOR_{field.upper()}: the model {nothing} does not exist: choose a folder")


BAD_TEMPLATES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "cannot read the chat template"),
    "no text": (b"\xff", "cannot read the chat template"),
    "cut": (b"{% for message in messages %}", "is no template of Jinja: TemplateSyntaxError: Unexpected end"),
    "an unknown filter": (b"{{ messages | nope }}", "is no template of Jinja: TemplateAssertionError: No filter named"),
    "a break outside of a loop": (b"{% break %}", "is no template of Jinja: SyntaxError: 'break' outside loop"),
}


@pytest.mark.parametrize(("content", "words"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_a_chat_template_that_is_none_is_named_with_its_variable(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    said = refused(chat_template=path)
    assert said.startswith("KVKEEP_EXECUTOR_CHAT_TEMPLATE: ")
    assert words in said
    assert str(path) in said


def test_a_chat_template_that_can_be_compiled_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}")
    check(settings_from({"KVKEEP_EXECUTOR_CHAT_TEMPLATE": str(path)}), {})
    check(settings_from({"KVKEEP_EXECUTOR_CHAT_TEMPLATE": ""}), {})


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    said = refused(model=tmp_path)
    assert said.startswith(f"KVKEEP_EXECUTOR_MODEL: cannot load the model {tmp_path}: it has no config.json; choose")
    (tmp_path / "a.gguf").touch()
    assert f"name the file itself: {tmp_path}/a.gguf" in refused(model=tmp_path)


@pytest.mark.parametrize("configuration", ["", "[]", "{", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_configuration_that_is_no_json_object_is_named(configuration: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model", configuration)
    assert f"KVKEEP_EXECUTOR_MODEL: cannot read {folder}/config.json: " in refused(model=folder)


def test_a_model_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path) -> None:
    """Root may read everything; these files nobody can."""
    folder = tmp_path / "model"
    (folder / "config.json").mkdir(parents=True)
    said = refused(model=folder)
    assert said.startswith(
        f"KVKEEP_EXECUTOR_MODEL: cannot read the model {folder}: {folder}/config.json: Is a directory"
    )
    assert "make it readable" in said
    assert "File name too long" in refused(model="/" + "x" * 300)
    assert "home" in refused(model="~nobody-of-this-name/model")


def test_a_tier_without_space_is_named(tmp_path: Path) -> None:
    said = refused(model=model(tmp_path / "model"), disk_cache_size="900TiB", disk_cache_dir=tmp_path / "disk")
    assert said.startswith("KVKEEP_EXECUTOR_DISK_CACHE_SIZE: no space for ")


def test_an_adapter_without_a_folder_is_named(tmp_path: Path) -> None:
    said = refused(model=model(tmp_path / "model"), adapters=f"sql={tmp_path}/sql")
    assert said == (
        f"KVKEEP_EXECUTOR_ADAPTERS: the adapter sql cannot be loaded: there is no folder {tmp_path}/sql; name a folder "
        "in PEFT's form"
    )


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_needs_a_driver(device: str, tmp_path: Path) -> None:
    missing = tmp_path / "nvidiactl"
    with pytest.raises(ModelError, match=rf"KVKEEP_EXECUTOR_DEVICE: {device} needs a GPU.*{missing}.*auto or cpu"):
        check_device(device, {}, [missing])
    for other in ("auto", "cpu"):
        check_device(other, {}, [missing])


@pytest.mark.parametrize("visible", ["", " ", "-1"])
def test_a_gpu_must_be_visible(visible: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        check_device("cuda", {"CUDA_VISIBLE_DEVICES": visible}, [tmp_path])


def test_a_gpu_needs_a_torch_that_was_built_for_gpus(tmp_path: Path) -> None:
    version = tmp_path / "version.py"
    for line, expected in (("cuda = None\nhip = None", False), ("cuda = '13.0'", True), ("hip = '7.1'", True)):
        version.write_text(line)
        assert computes_on_gpus(version) == expected
    installed = Path(torch.__file__).with_name("version.py")
    has_gpus = torch.version.cuda is not None or torch.version.hip is not None
    assert computes_on_gpus(installed) == has_gpus
    if not has_gpus:
        with pytest.raises(ModelError, match="the installed torch computes on CPUs only"):
            check_device("cuda", {}, [tmp_path])


def test_nothing_that_takes_seconds_is_imported() -> None:
    code = "import json, sys, executor.preflight; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert not {"torch", "transformers", "safetensors", "gguf"} & set(json.loads(done.stdout))
