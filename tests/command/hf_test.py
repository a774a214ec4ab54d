"""Models in and out of the program: trainer import, export, evaluate."""
import json
import math
import pathlib
import shutil
import struct
import sys
import unittest

from program import Case, write_shard

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


def tensors(path):
    """Name to (dtype, shape, bytes) over all safetensors files of a folder, or of one file."""
    path, found = pathlib.Path(path), {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        data = file.read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        for name, entry in json.loads(data[8:8 + size]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], entry["shape"], data[8 + size + begin:8 + size + end])
    return found


class Models(Case):
    def imported(self, name, ranks=1, **changes):
        config = self.config(model={}, data={"sequence_length": 17}, **changes)
        result = self.trainer("import", str(GOLDEN / name), "--config", config, ranks=ranks)
        self.expect(result, 0, "step_00000000", "config.json: its section model is not used")
        self.assertTrue((self.folder / "run" / "config.resolved.json").exists())  # what training goes on with
        return self.folder / "run" / "checkpoints" / "step_00000000"

    def evaluate(self, *arguments, ranks=1):
        result = self.trainer("evaluate", *arguments, ranks=ranks)
        self.expect(result, 0)
        return json.loads(result.output.strip().splitlines()[-1])

    def golden_shards(self, name):
        """A shard for each sequence of the golden batch, and transformers' mean loss over all targets."""
        expected = tensors(GOLDEN / f"{name}.expected.safetensors")
        tokens = struct.unpack("<34i", expected["input.tokens"][2])
        targets = struct.unpack("<34i", expected["input.targets"][2])
        (loss,) = struct.unpack("<d", expected["loss"][2])
        self.assertGreaterEqual(min(targets), 0)
        shards = []
        for row in range(2):
            ids = tokens[17 * row:17 * row + 17] + targets[17 * row + 16:17 * row + 17]
            self.assertEqual(ids[1:], targets[17 * row:17 * row + 17])
            shards.append(str(self.folder / f"row{row}"))
            write_shard(shards[-1], ids)
        return shards, loss


class HuggingFace(Models):
    def test_round_trip(self):
        """Import and export give back every tensor's bytes, whatever the files; config.json and tokenizer too."""
        for name, precision in (("hf_single_fp32", "fp32"), ("hf_sharded_bf16", "bf16_pure")):
            with self.subTest(name):
                checkpoint = self.imported(name, precision=precision)
                tokenizer = self.folder / "tokenizer.json"
                tokenizer.write_text("{}")
                out = self.folder / "out"
                self.expect(self.trainer("export", str(checkpoint), "--out", str(out), "--max-shard-size", "20KB",
                                         "--tokenizer", str(tokenizer)), 0)
                self.assertEqual(tensors(out), tensors(GOLDEN / name))
                self.assertTrue((out / "model.safetensors.index.json").exists())
                self.assertEqual((out / "tokenizer.json").read_text(), "{}")
                ours, theirs = (json.loads((f / "config.json").read_text()) for f in (out, GOLDEN / name))
                self.assertEqual(ours["rope_scaling"]["factor"], theirs["rope_parameters"]["factor"])
                self.assertEqual(ours["hidden_size"], theirs["hidden_size"])
                self.expect(self.trainer("export", str(checkpoint), "--out", str(out)), 2, "not an empty folder")
                shutil.rmtree(out)
                # A run's folder stands for its newest checkpoint; fp32 holds bf16 exactly.
                self.expect(self.trainer("export", str(self.folder / "run"), "--out", str(out), "--dtype", "fp32"), 0)
                self.assertEqual({t[0] for t in tensors(out).values()}, {"F32"})
                shutil.rmtree(out)
                shutil.rmtree(self.folder / "run")

    def test_evaluation_is_transformers(self):
        """The loss that transformers gives, from the folder and from the checkpoint that it was imported to."""
        for name in ("hf_single_fp32", "hf_sharded_bf16"):
            with self.subTest(name):
                shards, expected = self.golden_shards(name)
                checkpoint = str(self.imported(name))
                for model in (("--hf", str(GOLDEN / name)), ("--checkpoint", checkpoint)):
                    results = [self.evaluate(*model, "--data", shard, "--sequence-length", "17") for shard in shards]
                    self.assertEqual([r["tokens"] for r in results], [17, 17])
                    self.assertAlmostEqual(sum(r["loss"] for r in results) / 2, expected, delta=1e-5 * expected)
                    for r in results:
                        self.assertAlmostEqual(r["perplexity"], math.exp(r["loss"]), delta=1e-9 * r["perplexity"])
                shutil.rmtree(self.folder / "run")

    def test_options_of_evaluation(self):
        folder, data = str(GOLDEN / "hf_single_fp32"), str(self.folder / "validation")
        whole = self.evaluate("--hf", folder, "--data", data, "--sequence-length", "16")
        self.assertEqual((whole["sequences"], whole["tokens"]), (32, 512))
        batched = self.evaluate("--hf", folder, "--data", data, "--sequence-length", "16", "--batch-size", "5")
        self.assertEqual(batched["tokens"], 512)
        self.assertAlmostEqual(batched["loss"], whole["loss"], delta=1e-6)
        part = self.evaluate("--hf", folder, "--data", data, "--sequence-length", "16", "--sequences", "3")
        self.assertEqual((part["sequences"], part["tokens"]), (3, 48))
        masked = self.evaluate("--hf", folder, "--data", data, "--sequence-length", "16", "--ignore-token", "1")
        self.assertLess(masked["tokens"], 512)
        write_shard(data, [1] * 513)
        result = self.trainer("evaluate", "--hf", folder, "--data", data, "--sequence-length", "16", "--ignore-token", "1")
        self.expect(result, 3, "validation.bin: every target of the 32 sequences", " -> ")

    def test_a_configuration_without_a_model_is_imported_without_a_word_of_it(self):
        config = json.loads(pathlib.Path(self.config(data={"sequence_length": 17})).read_text())
        del config["model"]
        (self.folder / "config.json").write_text(json.dumps(config))
        result = self.trainer("import", str(GOLDEN / "hf_single_fp32"), "--config", str(self.folder / "config.json"))
        self.expect(result, 0, "step_00000000")
        self.assertNotIn("warning", result.output)

    def test_refusals(self):
        config, folder = self.config(model={}), self.folder / "hf"
        self.expect(self.trainer("import", str(self.folder / "none"), "--config", config), 2, "none/config.json", " -> ")
        shutil.copytree(GOLDEN / "hf_sharded_bf16", folder)
        self.expect(self.trainer("import", str(folder), "--config", config, "--set", "model.rope_theta=5"), 2,
                    "model.rope_theta=5", "hf/config.json", " -> ")
        (folder / "model-00002-of-00002.safetensors").unlink()
        self.expect(self.trainer("import", str(folder), "--config", config), 3, "model-00002-of-00002", " -> ")
        described = json.loads((folder / "config.json").read_text())
        described["num_hidden_layers"] = 3
        shutil.copy(GOLDEN / "hf_sharded_bf16" / "model-00002-of-00002.safetensors", folder)
        (folder / "config.json").write_text(json.dumps(described))
        self.expect(self.trainer("import", str(folder), "--config", config), 3, "missing", "model.layers.2.", " -> ")
        self.expect(self.trainer("evaluate", "--data", str(self.folder / "train")), 2, "--checkpoint", "--hf")
        self.expect(self.trainer("evaluate", "--hf", str(GOLDEN / "hf_single_fp32"), "--data",
                                 str(self.folder / "train"), "--sequence-length", "257"), 2, "257", "256", " -> ")
        self.expect(self.trainer("export", str(self.folder / "none"), "--out", str(self.folder / "x")), 3, "none", " -> ")
        self.imported("hf_single_fp32")
        again = self.trainer("import", str(GOLDEN / "hf_single_fp32"), "--config", self.config(model={}))
        self.expect(again, 2, "already holds a run", " -> ")


class HuggingFaceRanks(Models):
    def test_any_mesh(self):
        """Imported by four ranks of one mesh, exported by one process, evaluated by three ranks."""
        name = "hf_single_fp32"
        checkpoint = self.imported(name, ranks=4, mesh={"federate": 2, "shard": 2}, precision="fp32")
        out = self.folder / "out"
        self.expect(self.trainer("export", str(checkpoint), "--out", str(out)), 0)
        self.assertEqual(tensors(out), tensors(GOLDEN / name))
        data = ["--data", str(self.folder / "validation"), "--sequence-length", "16"]
        one = self.evaluate("--hf", str(GOLDEN / name), *data)
        three = self.evaluate("--checkpoint", str(checkpoint), *data, ranks=3)
        self.assertEqual(three["tokens"], one["tokens"])
        self.assertAlmostEqual(three["loss"], one["loss"], delta=1e-6)

    def test_errors_end_every_rank(self):
        result = self.trainer("evaluate", "--hf", str(GOLDEN / "hf_single_fp32"), "--data", str(self.folder / "none"),
                              ranks=3)
        self.expect(result, 3, "none", " -> ")


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
