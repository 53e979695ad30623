//! What the name of a parameter in the folder of a rank says: its place in the whole model, and how it is cut.

/// Maximum number of ranks, stages or virtual stages: a damaged count must not make work without end.
pub(super) const RANKS_MAX: u64 = 1 << 16;

/// How tensor parallelism cuts a tensor.
pub(super) enum Cut {
    /// Every rank has all of it.
    Whole,
    /// Along a dimension.
    Dim(usize),
    /// Along the rows, of the gate and the up projection alike.
    GateAndUp,
}

/// What comes before the number of an expert in a name, the number, and what follows.
pub(super) fn expert_of(name: &str) -> Option<(&str, u64, String)> {
    if let Some((before, rest)) = name.split_once(".local_experts.") {
        let (number, rest) = rest.split_once('.')?;
        return Some((before, number.parse().ok()?, rest.to_owned()));
    }
    // Grouped matrices have their number at the end: `experts.linear_fc1.weight3`.
    let (before, rest) = name.split_once(".experts.linear_fc")?;
    let (map, last) = rest.split_once('.')?;
    let digits = last.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    let kind = last.strip_suffix(digits)?;
    Some((&name[..before.len() + ".experts".len()], digits.parse().ok()?, format!("linear_fc{map}.{kind}")))
}

/// The name in the whole model, and how many layers there are up to that of the parameter. `None` if a number is too large.
pub(super) fn global_name(name: &str, layers: u64, experts: u64) -> Option<(u64, String)> {
    let mut name = name.to_owned();
    if let Some((before, number, rest)) = expert_of(&name) {
        name = format!("{before}.local_experts.{}.{rest}", number.checked_add(experts)?);
    }
    let Some((number, rest)) = name.strip_prefix("decoder.layers.").and_then(|rest| rest.split_once('.'))
    else {
        return Some((0, name));
    };
    let number: u64 = number.parse().ok().filter(|number| *number < RANKS_MAX)?;
    Some((number + 1, format!("decoder.layers.{}.{rest}", number.checked_add(layers)?)))
}

/// How tensor parallelism cuts a parameter; `None` if it is not known.
pub(super) fn cut_of(name: &str, is_gated: bool) -> Option<Cut> {
    let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    if name.contains(".experts.") {
        // Experts are cut by a size of their own (`expert_tensor_parallel_size`).
        return None;
    }
    if ends(&["linear_fc1.weight", "linear_fc1.bias"]) {
        return Some(if is_gated { Cut::GateAndUp } else { Cut::Dim(0) });
    }
    if ends(&["word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias"]) {
        return Some(Cut::Dim(0));
    }
    if ends(&["linear_proj.weight", "linear_fc2.weight"]) {
        return Some(Cut::Dim(1));
    }
    let whole = [
        "norm.weight",
        "norm.bias",
        "norm_weight",
        "norm_bias",
        "router.weight",
        "linear_proj.bias",
        "linear_fc2.bias",
    ];
    ends(&whole).then_some(Cut::Whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_experts_are_counted_over_stages_and_ranks() {
        let layer = "decoder.layers.2.mlp.experts.";
        let expert = "decoder.layers.7.mlp.experts.local_experts.9.linear_fc1.weight".to_owned();
        for name in ["local_experts.1.linear_fc1.weight", "linear_fc1.weight1"] {
            assert_eq!(global_name(&format!("{layer}{name}"), 5, 8), Some((3, expert.clone())), "{name}");
        }
        let norm = "decoder.final_layernorm.weight";
        assert_eq!(global_name(norm, 5, 8), Some((0, norm.to_owned())));
        assert_eq!(global_name(&format!("{layer}local_experts.{}.linear_fc2.weight", u64::MAX), 5, 8), None);
        assert_eq!(global_name("decoder.layers.99999999.mlp.linear_fc2.weight", 5, 8), None);
    }

    #[test]
    fn tensors_that_are_cut_in_an_unknown_way_have_no_cut() {
        assert!(matches!(cut_of("decoder.layers.0.mlp.linear_fc1.weight", true), Some(Cut::GateAndUp)));
        assert!(matches!(cut_of("decoder.layers.0.mlp.linear_fc1.weight", false), Some(Cut::Dim(0))));
        assert!(matches!(
            cut_of("decoder.layers.0.self_attention.linear_proj.weight", true),
            Some(Cut::Dim(1))
        ));
        assert!(cut_of("decoder.layers.0.self_attention.linear_kv_up_proj.weight", true).is_none());
        assert!(cut_of("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", true).is_none());
    }
}
