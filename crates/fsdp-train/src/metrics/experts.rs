//! Measures how evenly the tokens of a step were distributed over the experts of each mixture.

use serde::Serialize;

/// The number of tokens that each expert of each mixture received in a step, over all ranks. A token counts once for
/// each expert that it is sent to; padding after the last counted target of a sample does not count.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertLoads {
    /// The largest load of an expert over the mean load of its mixture, maximized over the mixtures: 1 if all loads are
    /// equal; the number of experts over the number of experts per token, if all tokens go to the same ones.
    pub expert_imbalance: f64,
    /// Number of experts without tokens, over all mixtures.
    pub idle_experts: u64,
    /// Number of tokens by mixture, in the order of layers, and expert.
    pub expert_tokens: Vec<Vec<u64>>,
}

impl ExpertLoads {
    /// Creates the loads of a step; `None` if there are no mixtures.
    pub(super) fn of(expert_tokens: Vec<Vec<u64>>) -> Option<Self> {
        if expert_tokens.is_empty() {
            return None;
        }
        let idle_experts = expert_tokens.iter().flatten().filter(|&&tokens| tokens == 0).count() as u64;
        let expert_imbalance = expert_tokens.iter().map(|loads| imbalance(loads)).fold(1.0, f64::max);
        Some(Self { expert_imbalance, idle_experts, expert_tokens })
    }
}

/// Returns the largest load over the mean load.
#[expect(clippy::cast_precision_loss, reason = "a number of tokens")]
fn imbalance(loads: &[u64]) -> f64 {
    let (largest, total) = (loads.iter().max().copied().unwrap_or(0), loads.iter().sum::<u64>());
    if total == 0 { 1.0 } else { largest as f64 * loads.len() as f64 / total as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_layer_sets_imbalance_and_idle_experts_are_summed() {
        assert_eq!(ExpertLoads::of(Vec::new()), None);
        let of =
            |loads: &[&[u64]]| ExpertLoads::of(loads.iter().map(|load| load.to_vec()).collect()).unwrap();
        let even = of(&[&[3, 3, 3, 3], &[0, 0, 0, 0]]);
        assert_eq!((even.expert_imbalance, even.idle_experts), (1.0, 4));
        let uneven = of(&[&[3, 3, 3, 3], &[6, 0, 6, 0], &[2, 3, 4, 3]]);
        assert_eq!((uneven.expert_imbalance, uneven.idle_experts), (2.0, 2));
        let one_for_all = of(&[&[0, 12, 0, 0]]);
        assert_eq!((one_for_all.expert_imbalance, one_for_all.idle_experts), (4.0, 3));
    }
}
