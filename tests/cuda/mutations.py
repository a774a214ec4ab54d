"""Faults to plant in the kernels, one at a time: mutate.py builds each and shows that a test sees it.

`old` stands exactly once in its file and is replaced by `new`. `program` and `tests` say which emulated kernel tests are
run: tests/kernels' <program>_plain, _race and _asan, and the test cases that Catch matches.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    program: str
    tests: str
    sample: bool = False  # one of the few of mutate.py --sample


def kernel(file: str, program: str, tests: str):
    """A function that makes faults of cuda/kernels/`file`."""
    return lambda name, old, new, sample=False: Mutation(
        name, f"cuda/kernels/{file}", old, new, program, tests, sample
    )


rmsnorm = kernel("rmsnorm.cu", "kernels_layers", "RMSNorm*")
reduce = kernel("reduce.h", "kernels_layers", "RMSNorm*")
embedding = kernel("embedding.cu", "kernels_layers", "embedding*,a token outside*")
rope = kernel("rope.cu", "kernels_layers", "rotary*")
swiglu = kernel("swiglu.cu", "kernels_layers", "SwiGLU*")
cross_entropy = kernel("cross_entropy.cu", "kernels_layers", "cross-entropy*")
sums = kernel("sums.cu", "kernels_flat", "sums*,an empty sum*")
optimizer = kernel("optimizer.cu", "kernels_flat", "AdamW*,SGD*,a step*")
elementwise = kernel("elementwise.cu", "kernels_flat", "fill*")
federation = kernel("federation.cu", "kernels_flat", "outer*")
int8 = kernel("int8.cu", "kernels_flat", "int8*")
initialize = kernel("initialize.cu", "kernels_flat", "initialisation*")
# The cheapest test that reaches the fault: 70 tokens are two tiles of keys, the second one in part.
SEQUENCES = "flash attention agrees with the reference in several sequences and groups of heads"
HEAD_SIZES = "flash attention agrees with the reference at every head size"
tiles = kernel("attention_tiles.cuh", "kernels_attention", SEQUENCES)
forward = kernel("attention_forward.cu", "kernels_attention", SEQUENCES)
backward = kernel("attention_backward.cu", "kernels_attention", SEQUENCES)
backward_256 = kernel("attention_backward.cu", "kernels_attention", HEAD_SIZES)  # two warps share keys at 256 alone
plain = kernel("attention_plain.cu", "kernels_attention", "attention on CUDA cores agrees*")

MUTATIONS = [
    # ---- barriers ----
    reduce(
        "block sum: no barrier between writing and reading the warps' sums",
        "partial[slot][warp] = x;\n  __syncthreads();",
        "partial[slot][warp] = x;",
        sample=True,
    ),
    rmsnorm(
        "RMSNorm backward: both rows' sums in one slot",
        "block_sum(dot, static_cast<int>(row & 1))",
        "block_sum(dot, 0)",
    ),
    rmsnorm(
        "RMSNorm weight gradient: no barrier before the groups' sums are added",
        "sums[group][lane] = sum;\n  __syncthreads();",
        "sums[group][lane] = sum;",
    ),
    cross_entropy(
        "cross-entropy: no barrier before the warps' maxima are read",
        "__syncthreads();\n  Softmax total",
        "Softmax total",
    ),
    cross_entropy(
        "cross-entropy: the target's logit is read where its gradient may already be",
        "const float chosen = at_target - all.most;",
        "const float chosen = (target < columns ? widen(x[target]) : at_target) - all.most;",
    ),
    embedding(
        "embedding backward: no barrier before the votes are counted",
        "found_by_warp[warp] = __popc(votes);\n    __syncthreads();",
        "found_by_warp[warp] = __popc(votes);",
    ),
    embedding(
        "embedding backward: no barrier before the found positions are read",
        "if (same) found[place] = p;\n    __syncthreads();",
        "if (same) found[place] = p;",
    ),
    embedding(
        "embedding backward: every occurrence of a token writes its row, unordered",
        "if (__syncthreads_or(earlier)) return;",
        "__syncthreads();",
    ),
    tiles(
        "attention: rows leave through shared memory without a warp barrier",
        "write_tile<D>(staging, chunk, d, lane);\n  __syncwarp();",
        "write_tile<D>(staging, chunk, d, lane);",
    ),
    forward(
        "attention forward: no barrier before a tile of values is read and the next key tile's place filled",
        "cp_async_wait<1>();\n    __syncthreads();\n    start_copy(v,",
        "cp_async_wait<1>();\n    start_copy(v,",
    ),
    backward_256(
        "attention backward: no barrier while two warps exchange their halves of the scores",
        "if constexpr (Tiles::shares > 1) {\n      __syncthreads();",
        "if constexpr (Tiles::shares > 1) {",
    ),
    # ---- asynchronous copies ----
    forward(
        "attention forward: the wait for keys is one group short",
        "cp_async_wait<1>();\n    __syncthreads();\n    start_copy(k,",
        "cp_async_wait<2>();\n    __syncthreads();\n    start_copy(k,",
        sample=True,
    ),
    forward(
        "attention forward: the wait for values is one group short",
        "cp_async_wait<1>();\n    __syncthreads();\n    start_copy(v,",
        "cp_async_wait<2>();\n    __syncthreads();\n    start_copy(v,",
    ),
    forward(
        "attention forward: the next tile lands on the one about to be multiplied",
        "tile == ring ? ring + (Tiles::ring - 1) * tile_size : tile - tile_size;",
        "tile;",
    ),
    backward(
        "attention backward: the next stage is copied over the one being read",
        "start_copy(stage ^ 1, step + 1);",
        "start_copy(stage, step + 1);",
    ),
    backward(
        "attention backward: no wait for a stage of keys and values",
        "cp_async_wait<0>();\n    __syncthreads();\n    start_copy(stage ^ 1, first_key",
        "__syncthreads();\n    start_copy(stage ^ 1, first_key",
    ),
    tiles(
        "attention: rows past the end are copied instead of zeroed",
        "row() + i < rows_left ? 16 : 0);",
        "row() + i < rows_left + 16 ? 16 : 0);",
    ),
    # ---- lanes and layouts ----
    tiles(
        "attention: a row's maximum over two of its four lanes",
        "x = fmaxf(x, __shfl_xor_sync(full_warp, x, 1));\n  return",
        "return",
    ),
    tiles(
        "attention: ldmatrix reads chunks where they were before swizzling",
        "(lane / 16) ^ Tile<D>::swizzle(lane % 16)",
        "lane / 16",
    ),
    tiles(
        "attention: the halves of a B operand are swapped",
        "mma_bf16(d[m][2 * n], left[m], right[0], right[2]);",
        "mma_bf16(d[m][2 * n], left[m], right[2], right[0]);",
        sample=True,
    ),
    tiles(
        "attention: probabilities of rows g and g + 8 change places",
        "a[m][k][2 * half] = pack_bf16x2(d[m][2 * k + half][0], d[m][2 * k + half][1]);",
        "a[m][k][2 * half] = pack_bf16x2(d[m][2 * k + half][2], d[m][2 * k + half][3]);",
    ),
    embedding(
        "embedding backward: a lane counts itself among those before it",
        "((1u << lane) - 1u)",
        "((2u << lane) - 1u)",
    ),
    int8(
        "int8: the largest magnitude over a quarter of the lanes",
        "for (int offset = warp_size / 2;",
        "for (int offset = warp_size / 8;",
    ),
    rope(
        "RoPE: turned the wrong way",
        "inverse ? -sines[k] : sines[k]",
        "inverse ? sines[k] : -sines[k]",
    ),
    swiglu(
        "SwiGLU backward: the gradients of gate and up change places",
        "store<N>(to, dgate, columns - c);\n  store<N>(to + columns, dup, columns - c);",
        "store<N>(to, dup, columns - c);\n  store<N>(to + columns, dgate, columns - c);",
    ),
    initialize(
        "initialisation: two words of a Philox block change places",
        "normal_pair(words.word[2], words.word[3],",
        "normal_pair(words.word[3], words.word[2],",
    ),
    optimizer(
        "stochastic rounding: four elements share a block of random words meant for eight",
        "philox_block(key, element / wide)",
        "philox_block(key, element / 4)",
    ),
    # ---- masks, edges and bounds ----
    tiles(
        "attention: a query sees the token after it",
        "i % 2 - 16 * m - i / 2 * 8 > 0)",
        "i % 2 - 16 * m - i / 2 * 8 > 1)",
    ),
    forward(
        "attention forward: the tile on the diagonal is not masked",
        "if (first_key + Tiles::keys - 1 > first_row) hide_future_columns",
        "if (first_key > first_row) hide_future_columns",
    ),
    backward(
        "attention backward: a tile of keys that the last query block sees is left out",
        "const bool visible = first_query + Tiles::queries > first_row;",
        "const bool visible = first_query > first_row;",
    ),
    tiles(
        "attention: rows past the end are stored",
        "if (column < N && first + row < end) {",
        "if (column < N && first + row < end + 16) {",
    ),
    cross_entropy(
        "cross-entropy: columns past the end count as zeros",
        "load<N>(x + c, columns - c, minus_infinity())",
        "load<N>(x + c, columns - c)",
    ),
    cross_entropy(
        "cross-entropy: a masked target is not masked",
        "if (target < 0) {",
        "if (target < -1) {",
    ),
    rmsnorm(
        "RMSNorm weight gradient: columns past the end are written",
        "if (group != 0 || column >= columns) return;",
        "if (group != 0) return;",
    ),
    rmsnorm(
        "RMSNorm backward: the last block's rows run past the end",
        "min(begin + rows_of_block, rows)",
        "min(begin + rows_of_block, rows + 1)",
    ),
    sums(
        "sums: neighbouring ranges overlap by one element",
        "min(begin + range, count)",
        "min(begin + range + 1, count)",
        sample=True,
    ),
    rope(
        "RoPE: the second sequence goes on counting positions",
        "blockIdx.x % sequence",
        "blockIdx.x % (2 * sequence)",
    ),
    plain(
        "attention without tensor cores: the last query of a group is left out",
        "count = min(warp_size, sizes.sequence - first);",
        "count = min(warp_size, sizes.sequence - first) - 1;",
    ),
    int8(
        "int8: the scale of a neighbouring block",
        "scales[at / block]",
        "scales[at / (block + 8)]",
    ),
    # ---- accumulators ----
    forward(
        "attention forward: the sum of exponentials is not faded with the maximum",
        "float sum = state.sum[m][half] * fade;",
        "float sum = state.sum[m][half];",
    ),
    rmsnorm(
        "RMSNorm weight gradient: overwritten where it should be added to",
        "narrow<T>(accumulate ? widen(out[column]) + sum : sum)",
        "narrow<T>(accumulate ? sum : sum)",
    ),
    elementwise(
        "axpby: y is read where b is 0",
        "if (b != 0.0f) {",
        "if (true) {",
    ),
    federation(
        "FedMom: the state keeps the new global value instead of the point before momentum",
        "state = v;",
        "state = next;",
    ),
    optimizer(
        "AdamW: the second moment of the unscaled gradient",
        "mul(mul(gi, gi), a.rest2)",
        "mul(mul(g[i], g[i]), a.rest2)",
    ),
]
