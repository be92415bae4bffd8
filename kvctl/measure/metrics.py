"""Reads the metrics of a process."""

import http.client
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from protos.rpc.security import Security


def samples(address: str, seconds: float, security: Security) -> Mapping[str, float]:
    """Values by the names of samples, each summed over its labels. Raises OSError, ValueError."""
    # Calls processes of a stack directly, whatever the machine's proxy settings are.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if security.tls_ca_file is not None:
        context = ssl.create_default_context(cafile=security.tls_ca_file)
        if security.tls_cert_file is not None:
            context.load_cert_chain(security.tls_cert_file, security.tls_key_file)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    scheme = "http" if security.tls_ca_file is None else "https"
    try:
        with urllib.request.build_opener(*handlers).open(f"{scheme}://{address}/metrics", timeout=seconds) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode("utf-8", "replace").strip()
        raise OSError(f"{address} answers with status {error.code}: {said}") from None
    except http.client.HTTPException as error:
        raise OSError(f"{address} does not answer in HTTP: {type(error).__name__}") from error
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value  # type: ignore[assignment]
    return sums
