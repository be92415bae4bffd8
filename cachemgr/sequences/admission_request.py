"""What an admission asks for: checked before any state is looked at."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from hashlib import sha256

from cachemgr.retention import priority as retention
from cachemgr.retention.priority import REQUEST, SESSION
from cachemgr.tokens import pack, packed_bytes
from cachemgr.types import AdmitRequest
from cachemgr.validation import check_extra_keys, check_id
from protos.errors import InvalidField


def check_request(request: AdmitRequest) -> array[int]:
    """Returns the packed tokens. Raises InvalidField for what is wrong without looking at any state."""
    check_id("sequence_id", request.sequence_id)
    if not request.token_ids:
        raise InvalidField("token_ids", "must not be empty")
    if request.adapter_id is not None and not 0 <= request.adapter_id < 1 << 64:
        raise InvalidField("adapter_id", "must fit into 64 bits")
    for field in ("salt", "session_id", "request_id", "tenant_id"):
        value = getattr(request, field)
        if value is not None:
            check_id(field, value)
    prompt = request.num_prompt_tokens
    if prompt is not None and not 1 <= prompt <= len(request.token_ids):
        raise InvalidField("num_prompt_tokens", f"must be from 1 to the {len(request.token_ids)} tokens known")
    retention.check(request.retention)
    check_extra_keys("extra_keys", request.extra_keys, len(request.token_ids))
    try:
        return pack(request.token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidField("token_ids", "must be numbers from 0 to 4294967295") from error


def content(request: AdmitRequest, tokens: array[int]) -> object:
    """What two admissions with one id must have in common to be the same."""
    return (
        request.executor_id,
        sha256(packed_bytes(tokens)).digest(),
        request.salt,
        request.adapter_id,
        holder(request),
        request.num_prompt_tokens,
        request.retention,
        request.tenant_id,
        request.extra_keys,
        None if request.hints is None else json.dumps(asdict(request.hints), sort_keys=True),
        request.eviction_policy,
        request.no_read,
        request.no_store,
        request.lowest_tier,
    )


def holder(request: AdmitRequest) -> str:
    """Whose wishes they are."""
    if request.session_id is not None:
        return SESSION + request.session_id
    return REQUEST + (request.request_id or request.sequence_id)
