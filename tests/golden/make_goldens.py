#!/usr/bin/env python3
"""Writes the golden files of this folder with PyTorch and transformers (see README.md).

    python3 -m venv build/goldens && build/goldens/bin/pip install -r tests/golden/requirements.txt
    build/goldens/bin/python tests/golden/make_goldens.py            # writes beside this script
    build/goldens/bin/python tests/golden/make_goldens.py --out build/remade --check  # compares instead

The values are those of the float64 run, rounded to float32 for storage. Before anything is written
the script demands that
  - Hugging Face's own float32 run, eager and SDPA, agrees with them (so they are its values);
  - every mistake in reference.mistakes() moves the logits, the loss and the gradients far past the
    tolerance a test uses (so a test against these files can fail).
"""

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
import transformers
from transformers import LlamaForCausalLM

import reference

HERE = Path(__file__).resolve().parent
ADAMW = {"steps": 10, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
FP32_TOLERANCE = 1e-5  # what the project's fp32 tests allow, by norm
MISTAKE_FACTOR = 20    # a mistake must exceed the tolerance this many times over
FILE_LIMIT, FOLDER_LIMIT = 2 * 10**6, 8 * 10**6  # bytes


def shape(hidden, ffn, layers, heads, kv_heads, head_dim, vocabulary, tied, eps, theta=10000.0,
          scaling=None, positions=256):
    return {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": ffn,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "max_position_embeddings": positions, "rms_norm_eps": eps,
            "rope_theta": theta, "rope_scaling": scaling, "tie_word_embeddings": tied}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}

# name -> model, batch, sequence length, fraction of targets ignored
CASES = {
    "mha_d32_tied": (shape(64, 80, 2, 2, 2, 32, 997, True, 1e-5), 2, 17, 0.0),
    "gqa3_d64_untied": (shape(48, 72, 2, 6, 2, 64, 131, False, 1e-3), 2, 33, 0.3),
    "gqa4_d80_tied": (shape(32, 48, 1, 8, 2, 80, 331, True, 1e-4), 1, 65, 0.0),
    "gqa7_d32_untied": (shape(56, 40, 1, 14, 2, 32, 89, False, 1e-3), 2, 17, 0.0),
    "gqa2_d128_llama3": (shape(32, 56, 2, 4, 2, 128, 61, False, 1e-3, 500000.0, LLAMA3), 2, 129, 0.0),
}


def random_weights(model: dict, generator: torch.Generator) -> dict:
    """float32 weights, name -> tensor. Scales keep attention sharp (score deviation about 2), logits
    large (deviation about 1.5) and norm weights away from one, so that no part is close to trivial."""
    gain = {"q_proj": 1.4, "k_proj": 1.4, "v_proj": 1.0, "o_proj": 1.0, "gate_proj": 1.2,
            "up_proj": 1.2, "down_proj": 1.0, "lm_head": 1.5, "embed_tokens": 1.5}
    weights = {}
    for name, parameter in LlamaForCausalLM(reference.hf_config(model)).named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            weights[name] = 1.0 + 0.25 * noise
            continue
        kind = name.split(".")[-2]
        whole = kind == "embed_tokens" and not model["tie_word_embeddings"]
        weights[name] = noise * (1.0 if whole else gain[kind] / math.sqrt(parameter.shape[1]))
    return weights


def random_batch(model: dict, batch: int, length: int, ignored: float, generator: torch.Generator):
    """(B, S) tokens and their (B, S) successors, a fraction of the latter ignored."""
    text = torch.randint(0, model["vocab_size"], (batch, length + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < ignored] = reference.IGNORED
    return text[:, :-1].contiguous(), targets


def check_own_fp32(name, model, weights, batch, golden, trained) -> dict:
    """PyTorch's float32 error against the golden, the larger of eager and SDPA, per tensor."""
    errors = {}
    for attention in ("eager", "sdpa"):
        run = reference.evaluate(reference.build(model, weights, torch.float32, attention), *batch)
        run |= reference.train(reference.build(model, weights, torch.float32, attention), *batch, **ADAMW)
        for key, truth in (golden | trained).items():
            errors[key] = max(errors.get(key, 0.0), reference.relative_error(run[key], truth))
    for key, error in errors.items():
        limit = FP32_TOLERANCE / 2
        if not error < limit:
            sys.exit(f"{name}: float32 and float64 disagree on {key}: {error:.2e}, allowed {limit:.0e}")
    return errors


def bf16_errors(model, weights, batch, golden, generator, autocast: bool) -> dict:
    """PyTorch's bf16 error against the golden per tensor, the larger of eager and SDPA. The error of
    a single number is a matter of luck, so loss and norm take the largest over 16 batches."""
    dtype = torch.float32 if autocast else torch.bfloat16
    runs = [(batch, golden)]
    truth_model = reference.build(model, weights, torch.float64, "sdpa")
    rows, length = batch[0].shape
    for _ in range(15):
        other = random_batch(model, rows, length, 0.0, generator)
        runs.append((other, reference.evaluate(truth_model, *other)))
    errors = {}
    for attention in ("eager", "sdpa"):
        tested = reference.build(model, weights, dtype, attention)
        for index, (inputs, truth) in enumerate(runs):
            found = reference.evaluate(tested, *inputs, autocast=autocast)
            for key, expected in truth.items():
                if index == 0 or expected.numel() == 1:
                    errors[key] = max(errors.get(key, 0.0), reference.relative_error(found[key], expected))
    return errors


def check_mistakes(name, model, weights, batch, golden) -> dict:
    """Relative change that each mistake makes to logits, loss and the worst gradient."""
    seen = {}
    for mistake, (patch, config) in reference.mistakes(model).items():
        built = reference.build(config, weights, torch.float64, "eager")
        found = reference.evaluate(built, *batch, mistake=patch)
        change = {key: reference.relative_error(found[key], golden[key]) for key in golden}
        gradient = max(value for key, value in change.items() if key.startswith("grad."))
        seen[mistake] = {"logits": change["logits"], "loss": change["loss"], "gradient": gradient}
        for key in ("logits", "gradient"):
            if seen[mistake][key] < MISTAKE_FACTOR * FP32_TOLERANCE:
                sys.exit(f"{name}: '{mistake}' changes the {key} by {seen[mistake][key]:.1e} only: "
                         "a test against this case could not see it")
    with reference.unchanged_by_shift():
        found = reference.evaluate(reference.build(model, weights, torch.float64, "sdpa"), *batch)
    shift = reference.relative_error(found["logits"], golden["logits"])
    if shift > FP32_TOLERANCE:
        sys.exit(f"{name}: moving all positions by one changed the logits by {shift:.1e}")
    return seen


def stored(tensors: dict) -> dict:
    """Vectors and matrices as float32, single numbers and short series in full."""
    wide = ("loss", "grad_norm", "adamw.losses", "adamw.grad_norms")
    return {key: (value.double() if key in wide else value.float()).contiguous()
            for key, value in tensors.items()}


def scalars(prefix: str, values: dict) -> dict:
    return {f"{prefix}.{key}": torch.tensor([value], dtype=torch.float64) for key, value in values.items()}


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def make_case(folder: Path, index: int, name: str) -> dict:
    model, rows, length, ignored = CASES[name]
    generator = torch.Generator().manual_seed(20240 + index)
    weights = random_weights(model, generator)
    batch = random_batch(model, rows, length, ignored, generator)

    golden = reference.evaluate(reference.build(model, weights, torch.float64, "sdpa"), *batch)
    trained = reference.train(reference.build(model, weights, torch.float64, "sdpa"), *batch, **ADAMW)
    fp32 = check_own_fp32(name, model, weights, batch, golden, trained)
    bf16 = bf16_errors(model, weights, batch, golden, generator, autocast=False)
    mixed = bf16_errors(model, weights, batch, golden, generator, autocast=True)
    mistakes = check_mistakes(name, model, weights, batch, golden)

    folder.mkdir(parents=True, exist_ok=True)
    config = reference.hf_config(model, architectures=["LlamaForCausalLM"], dtype="float32")
    config.save_pretrained(folder)
    write_json(folder / "config.inline.json", model)
    tensors = {"input.tokens": batch[0].int(), "input.targets": batch[1].int()}
    tensors |= {f"weight.{key}": value for key, value in weights.items()}
    tensors |= stored(golden) | stored(trained)
    tensors |= scalars("fp32_error", fp32) | scalars("bf16_error", bf16) | scalars("autocast_error", mixed)
    safetensors.torch.save_file(tensors, folder / "golden.safetensors", metadata={"format": "pt"})
    print(f"{name}: loss {golden['loss'].item():.6f}, norm {golden['grad_norm'].item():.4f}, "
          f"ten steps to {trained['adamw.losses'][-1].item():.6f}; float32 errors up to "
          f"{max(fp32.values()):.1e}; bf16 logits {bf16['logits']:.1e}, loss {bf16['loss']:.1e}", flush=True)
    return {"fp32_error_max": max(fp32.values()), "bf16_error_logits": bf16["logits"],
            "bf16_error_loss": bf16["loss"],
            "bf16_error_gradient_max": max(v for k, v in bf16.items() if k.startswith("grad.")),
            "mistakes": mistakes}


def make_hf_folders(folder: Path) -> None:
    """Two folders as save_pretrained writes them, with the logits they must give in float32."""
    folders = (("hf_single_fp32", torch.float32, False, "1GB"), ("hf_sharded_bf16", torch.bfloat16, True, "40KB"))
    for index, (name, dtype, tied, limit) in enumerate(folders):
        model = shape(32, 48, 2, 4, 2, 32, 97, tied, 1e-5, 500000.0, LLAMA3)
        generator = torch.Generator().manual_seed(777 + index)
        weights = {k: v.to(dtype) for k, v in random_weights(model, generator).items()}
        saved = reference.build(model, weights, dtype, "eager")
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        saved.save_pretrained(target, max_shard_size=limit)
        (target / "generation_config.json").unlink(missing_ok=True)
        loaded = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32,
                                                  attn_implementation="eager")
        tokens, targets = random_batch(model, 2, 17, 0.0, generator)
        wide = {name: value.double() for name, value in loaded.named_parameters()}
        golden = reference.evaluate(reference.build(model, wide, torch.float64, "sdpa"), tokens, targets)
        with torch.no_grad():
            error = reference.relative_error(loaded(input_ids=tokens).logits, golden["logits"])
        if error > FP32_TOLERANCE / 2:
            sys.exit(f"{name}: the folder gives other logits when loaded back ({error:.1e})")
        expected = {"input.tokens": tokens.int(), "input.targets": targets.int()}
        expected |= stored({key: golden[key] for key in ("logits", "loss")})
        safetensors.torch.save_file(expected, folder / f"{name}.expected.safetensors",
                                    metadata={"format": "pt"})


def rope_table() -> list:
    """Inverse frequencies as transformers computes them, in float32."""
    llama31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    settings = [("llama3.1-8b", 128, 500000.0, llama31),
                ("llama3.2-1b", 64, 500000.0, {**llama31, "factor": 32.0}),
                ("llama2-7b", 128, 10000.0, None), ("golden gqa2_d128_llama3", 128, 500000.0, LLAMA3)]
    table = []
    for name, head_dim, theta, scaling in settings:
        config = reference.hf_config({
            "hidden_size": 32 * head_dim, "num_attention_heads": 32, "head_dim": head_dim,
            "max_position_embeddings": 131072, "rope_theta": theta, "rope_scaling": scaling})
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        assert rotary.attention_scaling == 1.0
        table.append({"name": name, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling,
                      "inv_freq": rotary.inv_freq.tolist()})
    return table


def schedule_table() -> list:
    """lr[i] is what Hugging Face's scheduler gives the optimizer's i-th step, i counted from 0."""
    peak, opt = 3e-4, transformers.optimization
    settings = [
        ("cosine", opt.get_cosine_schedule_with_warmup,
         {"num_warmup_steps": 6, "num_training_steps": 64}, 64),
        ("cosine", opt.get_cosine_schedule_with_warmup,
         {"num_warmup_steps": 0, "num_training_steps": 17}, 17),
        ("cosine_min_lr", opt.get_cosine_with_min_lr_schedule_with_warmup,
         {"num_warmup_steps": 5, "num_training_steps": 40, "min_lr": 3e-5}, 40),
        ("linear", opt.get_linear_schedule_with_warmup,
         {"num_warmup_steps": 6, "num_training_steps": 64}, 64),
        ("constant", opt.get_constant_schedule_with_warmup, {"num_warmup_steps": 6}, 20),
        ("constant", opt.get_constant_schedule, {}, 5),
    ]
    for decay, ratio in (("linear", 0.0), ("cosine", 0.0), ("linear", 0.1), ("cosine", 0.1)):
        settings.append(("wsd", opt.get_wsd_schedule,
                         {"num_warmup_steps": 6, "num_stable_steps": 38, "num_decay_steps": 20,
                          "warmup_type": "linear", "decay_type": decay, "min_lr_ratio": ratio}, 64))
    table = []
    for kind, factory, arguments, steps in settings:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
        scheduler = factory(optimizer, **arguments)
        rates = []
        for _ in range(steps + 1):  # one past the end: where the schedule arrives
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        table.append({"kind": kind, "function": factory.__name__, "peak_lr": peak,
                      "arguments": arguments, "steps": steps, "lr": rates})
    paper = table[0]["lr"]  # the values published with the paper's artifact
    for step, value in ((0, 0.0), (1, 5e-5), (5, 2.5e-4), (6, 3e-4), (35, 1.5e-4), (63, 2.2e-7)):
        assert math.isclose(paper[step], value, rel_tol=0.02), (step, paper[step])
    return table


def compare(made: Path, kept: Path) -> None:
    """Fails unless every file in `made` is in `kept` with the same numbers, up to float32 rounding."""
    for path in sorted(made.rglob("*")):
        other = kept / path.relative_to(made)
        if path.is_dir():
            continue
        if not other.exists():
            sys.exit(f"{other} is missing")
        if path.suffix == ".safetensors":
            left, right = (safetensors.torch.load_file(p) for p in (path, other))
            same = left.keys() == right.keys() and all(
                "_error." in key
                or torch.allclose(left[key].double(), right[key].double(), rtol=1e-6, atol=1e-7)
                for key in left)
        else:
            same = path.name == "sensitivity.json" or path.read_bytes() == other.read_bytes()
        if not same:
            sys.exit(f"{other} differs from what this script makes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE,
                        help="folder to write to (default: beside this script)")
    parser.add_argument("--check", type=Path, nargs="?", const=HERE, metavar="FOLDER",
                        help="after writing to --out, compare with FOLDER (default: beside this script)")
    arguments = parser.parse_args()
    out = arguments.out
    if arguments.check and out.resolve() == arguments.check.resolve():
        sys.exit("--check needs another folder in --out -> add --out build/goldens-check")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)

    summary = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    summary["cases"] = {name: make_case(out / name, index, name) for index, name in enumerate(CASES)}
    write_json(out / "sensitivity.json", summary)
    make_hf_folders(out)
    write_json(out / "rope.json", rope_table())
    write_json(out / "schedule.json", schedule_table())

    for path in out.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes for the owner alone
    sizes = {path: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    for path, size in sizes.items():
        if size > FILE_LIMIT:
            sys.exit(f"{path} has {size} bytes, allowed {FILE_LIMIT}")
    if sum(sizes.values()) > FOLDER_LIMIT:
        sys.exit(f"the folder has {sum(sizes.values())} bytes, allowed {FOLDER_LIMIT}")
    if arguments.check:
        compare(out, arguments.check)
        print(f"the same as {arguments.check}")


if __name__ == "__main__":
    main()
