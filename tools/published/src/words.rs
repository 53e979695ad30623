//! The text of a row, with the many spellings of a policy normalized.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use regex::Regex;

use crate::row::Row;

/// Patterns of sharding names in lower case, and their normal forms.
const SHARDINGS: [(&str, &str); 11] = [
    (r"zero[-_ ]*(?:stage)?[-_ ]*([123])", "zero$1"),
    (r"hybrid[-_ ]*(?:full)?[-_ ]*shard(?:ed|ing)?", "hsdp"),
    (r"no[-_ ]*shard(?:ing|ed)?", "ddp"),
    (r"shard[-_ ]*grad[-_ ]*op", "shard_grad_op"),
    (r"ful+y?[-_ ]*shard(?:ed|ing)?(?:[-_ ]*data[-_ ]*parallel)?", "full_shard"),
    (r"dist(?:ributed)?[-_ ]*opt(?:imizer)?", "zero1"),
    (r"fsdp[-_ ]*v2|fsdp[-_ ]2\b", "fsdp2"),
    (r"xla[-_ ]+fsdp", "xla_fsdp"),
    (r"jax[-_ ]+fsdp", "jax_fsdp"),
    (r"^(?:dp|data[-_ ]*parallel|distributed[-_ ]*data[-_ ]*parallel|replicated?)$", "ddp"),
    (r"^(?:no|off|false|single[-_ ]*(?:gpu|device)?|1[-_ ]*gpu)$", "none"),
];

/// Patterns of checkpointing names, and their normal forms.
const CHECKPOINTING: [(&str, &str); 4] = [
    (r"^(?:no|off|false|never|0)$", "none"),
    (r"^(?:yes|on|true|all|1|every[-_ ]*layer|block)$", "full"),
    (r"^(?:selective|sac)[-_ /]*(op|layer)", "selective_$1"),
    (r"^sac$", "selective_op"),
];

/// Parts of a normalized `sharding` that are understood.
const UNDERSTOOD: [&str; 7] = ["fsdp", "hsdp", "zero", "ddp", "shard", "intra", "none"];

/// The text of a row, in lower case.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    pub(crate) source: String,
    pub(crate) model: String,
    pub(crate) sharding: String,
    pub(crate) precision: String,
    pub(crate) checkpointing: String,
    pub(crate) compile: String,
}

fn normalize(text: String, spellings: &[(&str, &str)]) -> String {
    spellings.iter().fold(text, |text, (pattern, replacement)| {
        pattern_of(pattern).replace_all(&text, *replacement).into_owned()
    })
}

/// Returns a constant pattern, compiled at its first use: that takes far longer than to match it, and each row is
/// matched with dozens.
pub(crate) fn pattern_of(pattern: &str) -> Arc<Regex> {
    static COMPILED: Mutex<BTreeMap<String, Arc<Regex>>> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let regex = || Arc::new(Regex::new(pattern).expect("the pattern is constant"));
    Arc::clone(compiled.entry(pattern.to_owned()).or_insert_with(regex))
}

/// Whether the text contains a match of a pattern.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    pattern_of(pattern).is_match(text)
}

/// The number in the first group of a pattern; `None` without a match.
pub(crate) fn number_in(pattern: &str, text: &str) -> Option<usize> {
    pattern_of(pattern).captures(text)?.get(1)?.as_str().parse().ok()
}

impl Words {
    /// Normalizes the text of a row.
    pub(crate) fn of(row: &Row) -> Self {
        Self {
            source: row.word("source"),
            model: row.word("model"),
            sharding: normalize(row.word("sharding"), &SHARDINGS),
            precision: row.word("precision"),
            checkpointing: normalize(row.word("act_ckpt"), &CHECKPOINTING),
            compile: row.word("compile"),
        }
    }

    /// Whether the sharding is one of those that are understood.
    pub(crate) fn is_sharding_understood(&self) -> bool {
        UNDERSTOOD.iter().any(|word| self.sharding.contains(word))
    }

    /// Whether the sharding contains `part`.
    pub(crate) fn shards_by(&self, part: &str) -> bool {
        self.sharding.contains(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_spellings_are_normalized() {
        let sharding = |text: &str| normalize(text.to_lowercase(), &SHARDINGS);
        for text in ["ZeRO-3", "zero_3", "ZeRO Stage 3", "zero3"] {
            assert_eq!(sharding(text), "zero3");
        }
        let same = [
            ("HYBRID_SHARD", "hsdp"),
            ("NO_SHARD", "ddp"),
            ("FULL_SHARD", "full_shard"),
            ("Fully Sharded Data Parallel", "full_shard"),
            ("SHARD_GRAD_OP", "shard_grad_op"),
            ("FSDP v2", "fsdp2"),
            ("fsdp2x32+tp8", "fsdp2x32+tp8"),
            ("fsdp1_full_shard(zero3)", "fsdp1_full_shard(zero3)"),
            ("ddp+dist_opt(zero1)", "ddp+zero1(zero1)"),
            ("Data Parallel", "ddp"),
            ("jax_fsdp+dcn_dp2", "jax_fsdp+dcn_dp2"),
        ];
        for (text, expected) in same {
            assert_eq!(sharding(text), expected);
        }
        let kept = |text: &str| normalize(text.to_lowercase(), &CHECKPOINTING);
        assert_eq!(["Full", "TRUE", "none", "Off"].map(kept), ["full", "full", "none", "none"]);
        assert_eq!(
            ["selective-op", "Selective layer", "selective(attn)+seq_parallel"].map(kept),
            ["selective_op", "selective_layer", "selective(attn)+seq_parallel"]
        );
    }
}
