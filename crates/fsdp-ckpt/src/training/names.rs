//! Finding the names of a model among those of a checkpoint: all of them stand behind one prefix, or none.

use std::collections::{BTreeMap, BTreeSet};

use super::Wanted;
use crate::error::NameDifferences;

/// What stands in front of the names of all parameters: of all prefixes of candidates that end in the name of a
/// parameter, the one behind which most parameters are; of several, the shortest.
pub(super) fn common_prefix<V>(held: &BTreeMap<String, V>, wanted: &[Wanted]) -> String {
    let mut prefixes = BTreeSet::from([String::new()]);
    // A parameter that is missing must not decide, so several are asked.
    for parameter in wanted.iter().take(3) {
        for name in &parameter.names {
            let ends = held.keys().filter_map(|key| key.strip_suffix(name.as_str()));
            prefixes.extend(ends.filter(|prefix| prefix.ends_with('.')).map(str::to_owned));
        }
    }
    let count = |prefix: &String| wanted.iter().filter(|one| name_of(held, one, prefix).is_some()).count();
    let mut best = String::new();
    let mut most = count(&best);
    for prefix in prefixes {
        let found = count(&prefix);
        if found > most || (found == most && prefix.len() < best.len()) {
            (best, most) = (prefix, found);
        }
    }
    best
}

/// The key of a parameter behind a prefix.
fn name_of<'a, V>(held: &'a BTreeMap<String, V>, wanted: &Wanted, prefix: &str) -> Option<&'a String> {
    let mut names = wanted.names.iter().map(|name| format!("{prefix}{name}"));
    names.find_map(|name| held.get_key_value(&name).map(|(key, _)| key))
}

/// The keys of all parameters in a map by name.
pub(super) fn keys<V>(held: &BTreeMap<String, V>, wanted: &[Wanted]) -> Vec<Option<String>> {
    let prefix = common_prefix(held, wanted);
    wanted.iter().map(|parameter| name_of(held, parameter, &prefix).cloned()).collect()
}

/// The tensors of parameters.
pub(super) struct Matched {
    /// Of each parameter.
    pub(super) names: Vec<Option<String>>,
    /// Of tied parameters, the tensor that is taken and another one of it.
    pub(super) tied: Vec<[String; 2]>,
}

impl Matched {
    /// Looks every parameter up, and notes those that are missing and tensors behind the prefix that are no parameter.
    pub(super) fn new(
        held: &BTreeMap<String, String>,
        wanted: &[Wanted],
        prefix: &str,
        differences: &mut NameDifferences,
    ) -> Matched {
        let mut known = BTreeSet::new();
        let (mut names, mut tied) = (Vec::new(), Vec::new());
        for parameter in wanted {
            let all = parameter.names.iter().map(|name| format!("{prefix}{name}"));
            let mut there = all.filter_map(|name| held.get_key_value(&name));
            let first = there.next();
            if first.is_none() {
                differences.missing.push(format!("{prefix}{}", parameter.names[0]));
            }
            for (key, other) in there {
                known.insert(key);
                tied.extend(first.map(|(_, first)| [first.clone(), other.clone()]));
            }
            known.extend(first.map(|(key, _)| key));
            names.push(first.map(|(_, tensor)| tensor.clone()));
        }
        let extra =
            held.keys().filter(|key| key.starts_with(prefix) && !known.contains(key) && !is_constant(key));
        differences.extra = extra.map(|key| held[key].clone()).collect();
        Matched { names, tied }
    }
}

/// Whether a tensor is a causal mask or a rotary table, which follows from the configuration.
fn is_constant(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}
