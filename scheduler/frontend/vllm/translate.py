"""Turns requests of vLLM's engine contract into messages of the generation service; translates field names back."""

from collections.abc import Sequence

from pydantic import ValidationError

from protos.generation.v1 import generation_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField
from protos.vllm import engine_pb2 as vllm
from scheduler.frontend.openai.errors import rename
from scheduler.frontend.openai.structured import ANY_OBJECT, StructuralTag
from scheduler.frontend.validation import MAX_FORM_BYTES, MAX_LOGPROBS

# Names of the message's fields in a request, most specific first.
NAMES: Sequence[tuple[str, str]] = (
    ("sampling.num_logprobs", "sampling_params.logprobs"),
    ("sampling.num_prompt_logprobs", "sampling_params.prompt_logprobs"),
    ("sampling.", "sampling_params."),
    ("structured_output.structural_tags.tags", "sampling_params.structural_tag.structures"),
    ("structured_output.structural_tags", "sampling_params.structural_tag"),
    ("structured_output.", "sampling_params."),
    ("prompt_truncation.max_tokens", "sampling_params.truncate_prompt_tokens"),
    ("token_ids.token_ids", "tokenized.input_ids"),
    *((name, f"sampling_params.{name}") for name in ("max_tokens", "stop_token_ids", "stop", "n")),
)
# Fields that no request may have, with the reason.
_REFUSED = {
    "mm_inputs": "is not supported: prompts have tokens only",
    "media_refs": "is not supported: prompts have tokens only",
    "extra_mm_inputs": "is not supported: prompts have tokens only",
    "kv_transfer_params": "is not supported: no other engine computes prompts",
    "kv_transfer_params_json": "is not supported: no other engine computes prompts",
}
# Keeps as many tokens of the prompt as fit.
_ALL_THAT_FIT = -1


def request(asked: vllm.GenerateRequest) -> pb.StreamGenerateRequest:
    """Converts a request. Raises InvalidField, with the request's field name, for what the service does not support."""
    for field, _ in asked.ListFields():
        if reason := _REFUSED.get(field.name):
            raise InvalidField(field.name, reason)
    if asked.data_parallel_rank != 0:
        raise InvalidField("data_parallel_rank", "must be 0: the engine has one part")
    params = asked.sampling_params
    message = pb.StreamGenerateRequest(
        request_id=asked.request_id,
        sampling=_sampling(params),
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        # Absent numbers are 0 in the contract.
        n=params.n or 1,
        structured_output=_form(params),
        # Answers have no text, but stop texts are searched for in the text of the output.
        keep_special_tokens=not params.skip_special_tokens,
        prompt_truncation=_truncation(params),
    )
    match asked.WhichOneof("input"):
        case "tokenized":
            message.token_ids.token_ids.extend(asked.tokenized.input_ids)
        case "text":
            message.text = asked.text
        case _:
            raise InvalidField("input", "is missing: give tokenized or text")
    return message


def _sampling(params: vllm.SamplingParams) -> pb.SamplingParams:
    for token_id in params.logit_bias:
        if token_id < 0:
            raise InvalidField(f"sampling_params.logit_bias.{token_id}", "must name an id, not a negative number")
    return pb.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        # Absent numbers are 0 in the contract, which is not a valid value of these fields.
        top_p=params.top_p or 1.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed % (1 << 64) if params.HasField("seed") else None,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        num_logprobs=_alternatives(params, "logprobs"),
        num_prompt_logprobs=_alternatives(params, "prompt_logprobs"),
    )


def _alternatives(params: vllm.SamplingParams, field: str) -> int | None:
    """Returns how many alternatives a field asks for; None for no log-probabilities. Raises InvalidField."""
    if not params.HasField(field):
        return None
    asked: int = getattr(params, field)
    if not 0 <= asked <= MAX_LOGPROBS:
        raise InvalidField(f"sampling_params.{field}", f"must be from 0 to {MAX_LOGPROBS}")
    return asked


def _form(params: vllm.SamplingParams) -> common.StructuredOutput | None:
    """Returns the form that the output must have. Raises InvalidField."""
    match params.WhichOneof("constraint"):
        case "json_schema":
            return common.StructuredOutput(json_schema=params.json_schema)
        case "regex":
            return common.StructuredOutput(regex=params.regex)
        case "grammar":
            return common.StructuredOutput(grammar=params.grammar)
        case "choice":
            return common.StructuredOutput(choice=common.TextChoice(texts=params.choice.choices))
        case "json_object" if params.json_object:
            return common.StructuredOutput(json_schema=ANY_OBJECT)
        case "structural_tag":
            return _structural_tag(params.structural_tag)
    return None


def _structural_tag(text: str) -> common.StructuredOutput:
    field = "sampling_params.structural_tag"
    # Checked before it is parsed, on the event loop.
    if len(text) > MAX_FORM_BYTES:
        raise InvalidField(field, f"has more than {MAX_FORM_BYTES} bytes")
    try:
        return StructuralTag.model_validate_json(text).form()
    except ValidationError as error:
        # Leaves out what the caller has sent.
        steps = error.errors(include_input=False)[0]["loc"]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        raise InvalidField(field + path, "must be the JSON text of structures and triggers") from None


def _truncation(params: vllm.SamplingParams) -> pb.PromptTruncation | None:
    if not params.HasField("truncate_prompt_tokens"):
        return None
    if params.truncate_prompt_tokens == _ALL_THAT_FIT:
        return pb.PromptTruncation()
    if params.truncate_prompt_tokens < 1:
        raise InvalidField("sampling_params.truncate_prompt_tokens", f"must be {_ALL_THAT_FIT} or at least 1")
    return pb.PromptTruncation(max_tokens=params.truncate_prompt_tokens)


def renamed(error: InvalidField) -> InvalidField:
    """Returns the error of a message's field as an error of the request's field."""
    [(field, description)] = error.fields.items()
    return type(error)(rename(field, NAMES), description)
