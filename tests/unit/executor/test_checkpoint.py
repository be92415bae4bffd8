"""What is served is all of one decoder, with every weight from its checkpoint; all else is refused in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MptConfig,
    Qwen2VLConfig,
    RobertaConfig,
    T5Config,
    WhisperConfig,
)

from bench import families
from executor.errors import ModelError
from executor.models.torch import TorchForward
from tests.unit.executor.conftest import load, on_torch, save_model
from tests.unit.executor.tiny_models import _SIZES, CONFIGS, VOCAB

Change = Callable[[Path], None]

LAYER = "model.layers.1.self_attn.q_proj.weight"


def weights(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the tensors of a folder."""

    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return apply


def configured(**fields: Any) -> Change:
    """Changes fields of a folder's configuration."""

    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return apply


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def with_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"}))


def only_an_adapter(folder: Path) -> None:
    with_adapter(folder)
    (folder / "config.json").unlink()


def only_gguf(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").rename(folder / "model-q4.gguf")


def broken_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def generates(text: str) -> Change:
    """Writes generation_config.json."""

    def change(folder: Path) -> None:
        (folder / "generation_config.json").write_text(text)

    return change


def pickled_codes(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[LAYER] = (tensors[LAYER] * 100).to(torch.int8)
    torch.save(tensors, folder / "pytorch_model.bin")
    file.unlink()


CHANGES: dict[str, tuple[Change, str]] = {
    "a weight is missing": (weights(lambda tensors: tensors.pop(LAYER)), rf"lacks: {LAYER}.*random"),
    "a layer is missing": (configured(num_hidden_layers=5), r"lacks: model\.layers\.4\..* and \d+ more"),
    "the output layer is missing": (weights(lambda tensors: tensors.pop("lm_head.weight")), r"lacks: lm_head\.weight"),
    "layers are left over": (configured(num_hidden_layers=3), r"does not use: model\.layers\.3\."),
    "a shape differs": (configured(intermediate_size=40), r"other shapes of: model\.layers\.0\.mlp"),
    "an adapter is beside it": (with_adapter, r"LoRA adapter.*KVKEEP_EXECUTOR_ADAPTERS"),
    "only an adapter": (only_an_adapter, r"LoRA adapter.*KVKEEP_EXECUTOR_ADAPTERS"),
    "only a GGUF file": (only_gguf, r"GGUF file.*name the file itself: .*model-q4\.gguf"),
    "quantised": (
        configured(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32}),
        r"quantised \(gptq\).*unquantised",
    ),
    "an unknown quantisation": (configured(quantization_config={"quant_method": "odd"}), r"quantised by odd"),
    "a file was cut off": (truncated, r"incomplete or damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"cannot load the model"),
    "weights are fp8 codes": (
        weights(lambda tensors: tensors.update({LAYER: tensors[LAYER].to(torch.float8_e4m3fn)})),
        rf"codes \(F8_E4M3\).*no quantization_config.*: {LAYER}; serve",
    ),
    "weights are integer codes": (
        weights(lambda tensors: tensors.update({LAYER: (tensors[LAYER] * 100).to(torch.int8)})),
        rf"codes \(I8\).*no quantization_config.*: {LAYER}; serve",
    ),
    "integer codes in torch's format": (pickled_codes, rf"codes \(int8\).*: {LAYER}; serve"),
    "a weight is no number": (
        weights(lambda tensors: tensors[LAYER].fill_(float("nan"))),
        r"no numbers in float32.*set KVKEEP_EXECUTOR_DTYPE",
    ),
    "generation_config.json is cut off": (generates("{"), r"generation_config\.json.*compare it.*or remove it"),
    "generation_config.json is a list": (generates("[]"), r"generation_config\.json.*no JSON object.*compare"),
    "an eos id beyond the vocabulary": (
        generates('{"eos_token_id": [1, 100000]}'),
        rf"generation_config\.json.*eos_token_id is \[1, 100000\].*below {VOCAB}.*compare",
    ),
    "a negative eos id": (generates('{"eos_token_id": -1}'), r"generation_config\.json.*eos_token_id is -1"),
    "an eos id that is a text": (generates('{"eos_token_id": "</s>"}'), r"eos_token_id is \"</s>\""),
    "an eos id that is a boolean": (generates('{"eos_token_id": true}'), r"eos_token_id is true"),
    "less than no tokens": (generates('{"max_new_tokens": -1}'), r"generation_config\.json.*max_new_tokens.*compare"),
    "an eos id of config.json beyond the vocabulary": (
        configured(eos_token_id=100000),
        r"^config\.json.*eos_token_id is 100000",
    ),
    "an unknown activation": (configured(hidden_act="odd"), r"config\.json has hidden_act 'odd'.*compare"),
    "unknown rotary embeddings": (
        configured(rope_parameters={"rope_type": "odd", "rope_theta": 10000.0}),
        r"config\.json has rope_parameters\.rope_type 'odd'.*compare",
    ),
    "no positions": (configured(max_position_embeddings=0), r"max_position_embeddings 0.*compare"),
    "code of its own": (
        configured(model_type="nonsense", auto_map={"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "x.Y"}),
        r"code of its own \(auto_map.*serve",
    ),
    "no JSON": (broken_configuration, r"config\.json"),
    "an unknown family": (configured(model_type="nonsense"), r"nonsense"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_checkpoint_that_is_not_all_there_is_refused(
    case: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    change, words = CHANGES[case]
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    change(folder)
    refused(folder, words)


def codes_beside(folder: Path) -> None:
    tensors = {name: tensor.to(torch.int8) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.int8.safetensors", {"format": "pt"})


UNREAD: dict[str, Change] = {
    "a pad id that means none": generates('{"eos_token_id": 2, "pad_token_id": -1}'),
    "a pad id behind the vocabulary": generates(f'{{"eos_token_id": 2, "pad_token_id": {VOCAB}}}'),
    "codes in another file": codes_beside,
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_not_read_refuses_no_model(case: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama"), folder)
    UNREAD[case](folder)
    on_torch(folder)


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        on_torch(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    # The remedy follows the fault.
    advices = ("choose ", "serve ", "merge ", "convert ", "check ", "compare ", "set ")
    assert any(advice in message for advice in advices)


@pytest.mark.parametrize("tied", [False, True], ids=["own output layer", "tied"])
def test_a_classifier_is_refused(tied: bool, tmp_path: Path) -> None:
    # With tied embeddings the output layer is there: only the head that is left over shows it.
    config = LlamaConfig(**_SIZES, tie_word_embeddings=tied, num_labels=2)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    refused(tmp_path, r"score\.weight" if tied else r"lm_head\.weight.*LlamaForSequenceClassification")


@pytest.mark.parametrize("kind", [BertConfig, RobertaConfig])
def test_an_encoder_is_refused(kind: Any, tmp_path: Path) -> None:
    sizes = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
    save_model(kind(**sizes), tmp_path)
    refused(tmp_path, "attends in both directions")
    AutoModelForSequenceClassification.from_config(kind(**sizes)).save_pretrained(tmp_path)
    refused(tmp_path, r"lacks: |both directions")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (FalconConfig(**_SIZES), "falcon: its attention does not go through"),
        (
            GPTJConfig(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                rotary_dim=4,
                bos_token_id=None,
                eos_token_id=None,
            ),
            "gptj: its attention",
        ),
        (
            GPTNeoConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global"], 2]],
                bos_token_id=None,
                eos_token_id=None,
            ),
            "gpt_neo: its attention",
        ),
        (MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4), "mpt: the model does not take packed"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_family_that_cannot_run_is_named_with_what_can(config: Any, words: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refused(tmp_path, f"{words}.*choose a decoder")


@pytest.mark.parametrize(
    ("config", "words"),
    [(T5Config(), "t5: .*encoder"), (WhisperConfig(), "whisper: .*encoder"), (Qwen2VLConfig(), "qwen2_vl: .*text")],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_is_no_decoder_of_text_alone_is_named(config: Any, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    refused(tmp_path, words)


@pytest.mark.parametrize("scale", [1, 8192], ids=["at once", "far into a sequence"])
def test_a_layer_that_counts_tokens_of_a_step_for_positions_is_refused(scale: int, tmp_path: Path) -> None:
    """The published scale changes nothing within a probe's lengths."""
    config = Llama4TextConfig(
        **{name: value for name, value in _SIZES.items() if name != "intermediate_size"},
        intermediate_size=32,
        intermediate_size_mlp=32,
        head_dim=8,
        num_local_experts=2,
        floor_scale=scale,
        layer_types=["full_attention"] * 4,
        no_rope_layers=[1, 0, 1, 0],
    )
    refused(save_model(config, tmp_path), "llama4_text: ")


def test_a_known_decoder_within_a_larger_model_runs_on_torch(tmp_path: Path) -> None:
    folder = save_model(families.configuration("got_ocr2"), tmp_path)
    assert isinstance(load(folder).forward, TorchForward)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_whole_checkpoint_is_served_in_each_type(name: str, model_folder: Callable[[str], Path]) -> None:
    assert on_torch(model_folder(name)).dtype == torch.float32
