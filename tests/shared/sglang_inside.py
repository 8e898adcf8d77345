"""Run by the Python of SGLang's environment, which has no moerl: what SGLang itself says of our lines and buckets.

Standard input: JSON `{"lines": [argv, ...], "payloads": [[class name, body], ...], "buckets": folder}`; the last line
of standard output: the same with answers, and `flags`, all that SGLang's parser knows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


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
    """Every spelling that the parser knows."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return sorted(parser._option_string_actions)


def parsed(name, body):
    """A request class of SGLang made of a payload: keys that it lacks, its fields as text; or the error."""
    import msgspec
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    kind = getattr(io_struct, name)
    fields = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    unknown = sorted(set(body) - set(fields))
    try:
        if name == "GenerateReqInput":
            made = kind(**body)
            made.normalize_batch_and_arguments()
            sampling = SamplingParams(**body["sampling_params"])
            sampling.normalize(None)
            sampling.verify(32000)
        else:
            made = msgspec.convert(body, kind)
        return {"unknown": unknown, "fields": {key: str(getattr(made, key)) for key in body}}
    except Exception as error:  # noqa: BLE001  whatever SGLang raises is the answer
        return {"unknown": unknown, "error": f"{type(error).__name__}: {error}"}


def round_trip(path):
    """Tensors of a safetensors file through SGLang's flattened bucket and its serializer; what differs afterwards."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = load_file(path)
    bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
    sent = MultiprocessingSerializer.serialize(
        {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}, output_str=True
    )
    got = MultiprocessingSerializer.deserialize(sent)
    again = FlattenedTensorBucket(flattened_tensor=got["flattened_tensor"], metadata=got["metadata"])
    back = dict(again.reconstruct_tensors())
    same = {name: back[name].dtype == x.dtype and torch.equal(back[name], x) for name, x in tensors.items()}
    layout = [
        [item.name, list(item.shape), str(item.dtype), item.start_idx, item.end_idx] for item in bucket.get_metadata()
    ]
    return {
        "same": same,
        "layout": layout,
        "type": str(bucket.get_flattened_tensor().dtype),
        "characters": len(sent),
        "names": sorted(back),
    }


def main():
    asked = json.load(sys.stdin)
    answers = {
        "flags": flags(),
        "lines": [resolved(argv) for argv in asked.get("lines", ())],
        "payloads": [parsed(name, body) for name, body in asked.get("payloads", ())],
        "buckets": [round_trip(path) for path in sorted(Path(asked["buckets"]).glob("*.safetensors"))]
        if asked.get("buckets")
        else [],
    }
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
