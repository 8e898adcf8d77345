"""Run by the Python of SGLang's environment, which has no moerl: what SGLang itself says of our lines and buckets.

Standard input: JSON `{"lines": [argv, ...], "payloads": [[class name, body], ...], "tokenizer": a model's folder,
"buckets": [bucket, ...]}`; the last line of standard output: the same with answers, and `flags`, all that SGLang's
parser knows. A bucket is `path`, a file of its tensors, `names`, their order, and `text`, what a server's rank is sent.
"""

from __future__ import annotations

import argparse
import json
import sys


def resolved(argv):
    """Some fields of the line after SGLang's parser and its resolution, or the error."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    try:
        args = ServerArgs.from_cli_args(parser.parse_args(argv))
        args.resolve_once()
        return {"resolved": {name: str(value) for name, value in args.resolved_dict().items()}}
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever SGLang raises is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def flags():
    """Every spelling that the parser knows -> the words that it takes, None where it takes any."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = parser._option_string_actions.items()
    return {flag: None if action.choices is None else [str(word) for word in action.choices] for flag, action in known}


def parsed(name, body, tokenizer):
    """A request class of SGLang made of a payload: keys that it lacks, fields as text, stop strings; or the error."""
    from pydantic import TypeAdapter
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    kind = getattr(io_struct, name)
    fields = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    unknown, stops = sorted(set(body) - set(fields)), []
    try:
        if name == "GenerateReqInput":
            made = kind(**body)
            made.normalize_batch_and_arguments()
            sampling = SamplingParams(**body["sampling_params"])
            sampling.normalize(tokenizer)
            sampling.verify(32000)
            stops = sampling.stop_strs
        else:
            made = TypeAdapter(kind).validate_python(body)  # as its HTTP server does
        return {"unknown": unknown, "fields": {key: str(getattr(made, key)) for key in body}, "stops": stops}
    except Exception as error:  # noqa: BLE001  whatever SGLang raises is the answer
        return {"unknown": unknown, "error": f"{type(error).__name__}: {error}"}


def received(path, names, text):
    """What SGLang takes out of `text`, as a rank of its server does, and where it would lay the same tensors itself."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    fields = FlattenedTensorMetadata.__dataclass_fields__
    got = MultiprocessingSerializer.deserialize(text)
    metadata = [FlattenedTensorMetadata(**{name: getattr(item, name) for name in fields}) for item in got["metadata"]]
    bucket = FlattenedTensorBucket(flattened_tensor=got["flattened_tensor"], metadata=metadata)
    back, tensors = dict(bucket.reconstruct_tensors()), load_file(path)
    own = FlattenedTensorBucket(named_tensors=[(name, tensors[name]) for name in names])
    layouts = [
        [[item.name, list(item.shape), str(item.dtype), item.start_idx, item.end_idx, item.numel] for item in items]
        for items in (metadata, own.get_metadata())
    ]
    return {
        "same": {name: name in tensors and is_same(x, tensors[name]) for name, x in back.items()},
        "layout": layouts[0],
        "own_layout": layouts[1],
        "is_own": torch.equal(own.get_flattened_tensor(), got["flattened_tensor"]),
    }


def is_same(one, other):
    """Bit for bit."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def main():
    from transformers import AutoTokenizer

    asked = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"]) if "tokenizer" in asked else None
    answers = {
        "flags": flags(),
        "lines": [resolved(argv) for argv in asked.get("lines", ())],
        "payloads": [parsed(name, body, tokenizer) for name, body in asked.get("payloads", ())],
        "buckets": [received(**bucket) for bucket in asked.get("buckets", ())],
    }
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
