//! What is expected of constants before they are fitted, and the file of fitted ones.

use fsdp_plan::Constants;

/// All constants: name, expected value, relative width of the expectation, and description.
pub(crate) const EXPECTED: [(&str, f64, f64, &str); 26] = [
    ("products.ampere", 0.82, 0.15, "the part of peak that large products reach"),
    ("products.hopper", 0.70, 0.15, "as above"),
    ("products.tpu-v4", 0.75, 0.15, "as above"),
    ("products.tpu-v5e", 0.80, 0.15, "as above"),
    ("attention.ampere", 0.58, 0.25, "the part of peak that FlashAttention-2 reaches, forward"),
    ("attention.hopper", 0.34, 0.25, "as above"),
    ("attention.tpu", 0.50, 0.30, "as above"),
    (
        "short_sums",
        60.0,
        0.6,
        "terms of a sum, or columns, for which a product has half its speed: fill and drain of tiles",
    ),
    ("short_sequences", 400.0, 0.5, "positions for which attention has half its speed"),
    ("elementwise.eager", 1.3, 0.3, "bytes relative to those of the operations, one kernel each"),
    ("elementwise.fused", 1.0, 0.2, "the same, compiled or written by hand"),
    ("elementwise.by_hand", 0.75, 0.25, "the same, with epilogues of products, for one model"),
    ("elementwise.f32", 1.7, 0.3, "factor on eager bytes where norms and rotations go through f32"),
    ("fp8", 1.45, 0.15, "speed of products in fp8 relative to bf16, quantisation included"),
    ("attention.backward", 0.80, 0.15, "speed of attention in backward relative to forward"),
    (
        "attention.triton",
        0.70,
        0.3,
        "speed of FlashAttention-1 and of Triton's kernel relative to FlashAttention-2",
    ),
    ("copies", 12.0, 0.6, "bytes that PyTorch's FSDP copies in backward for each unsharded parameter"),
    ("congestion", 0.04, 0.6, "part of the network's bandwidth lost with each doubling of nodes"),
    ("slices", 3e9, 0.6, "bytes a second of a TPU chip between slices"),
    ("update", 90.0, 0.5, "bytes of an update that is not one kernel, for each parameter of a rank"),
    ("network", 0.80, 0.2, "the part of the network's bandwidth that collectives reach"),
    ("torus", 0.50, 0.4, "the part of a torus' bandwidth that collectives reach"),
    (
        "drag",
        0.25,
        0.6,
        "computation lost during collectives, for the time that their bytes take on the links of a node",
    ),
    ("jitter", 0.006, 0.6, "deviation of the steps of nodes, as a part of a step"),
    ("slice_jitter", 0.015, 0.6, "the same, of slices of TPUs"),
    ("outside", 0.005, 0.8, "seconds of a step outside everything else: data, logging"),
];

/// Formats constants as `crates/fsdp-plan/constants.toml`.
pub(crate) fn to_toml(constants: &Constants) -> String {
    let lines = EXPECTED
        .iter()
        .map(|(name, _, _, about)| format!("# {about}\n\"{name}\" = {:.6e}\n", constants.get(name)));
    let head = "# Written by `cargo run --release -p fsdp-published -- fit --write`: constants of prices, fitted to\n\
                # tools/published/data/published.csv.\n\n";
    head.to_owned() + &lines.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fitted_constants_are_as_written() {
        let file = include_str!("../../../crates/fsdp-plan/constants.toml");
        assert_eq!(to_toml(&Constants::fitted()), file);
    }
}
