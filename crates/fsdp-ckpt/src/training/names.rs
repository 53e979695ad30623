//! Finds the names of a model among those of a checkpoint, all of which may share one prefix.

use std::collections::{BTreeMap, BTreeSet};

use super::Wanted;
use crate::differences::Differences;

/// The name under which PyTorch saves what a module returns from `get_extra_state`.
const EXTRA_STATE: &str = "_extra_state";

/// Returns the prefix of all parameter names. Of the candidates, which end where the name of a parameter begins, it is
/// the one with which most parameters are found, or the shortest of several.
pub(super) fn common_prefix<V>(held: &BTreeMap<String, V>, wanted: &[Wanted]) -> String {
    let mut prefixes = BTreeSet::from([String::new()]);
    // Several parameters provide candidates, because one of them may be missing, as a base may be.
    for parameter in wanted.iter().filter(|one| !one.is_base).take(3) {
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

/// Returns the key of a parameter with this prefix.
fn name_of<'a, V>(held: &'a BTreeMap<String, V>, wanted: &Wanted, prefix: &str) -> Option<&'a String> {
    let mut names = wanted.names.iter().map(|name| format!("{prefix}{name}"));
    names.find_map(|name| held.get_key_value(&name).map(|(key, _)| key))
}

/// Returns the keys of all parameters in a map by name.
pub(super) fn keys<V>(held: &BTreeMap<String, V>, wanted: &[Wanted]) -> Vec<Option<String>> {
    let prefix = common_prefix(held, wanted);
    wanted.iter().map(|parameter| name_of(held, parameter, &prefix).cloned()).collect()
}

/// Whether every key of an optimizer's states belongs to a wanted parameter, under any of its names.
pub(super) fn are_known<'a>(
    mut held: impl Iterator<Item = &'a String>,
    wanted: &[Wanted],
    keys: &[Option<String>],
) -> bool {
    let found: BTreeSet<&str> = keys.iter().flatten().map(String::as_str).collect();
    let names: BTreeSet<&str> = wanted.iter().flat_map(|one| &one.names).map(String::as_str).collect();
    let suffixes = |key: &'a str| key.match_indices('.').map(move |(at, _)| &key[at + 1..]);
    held.all(|key| {
        found.contains(&key[..])
            || names.contains(&key[..])
            || suffixes(key).any(|suffix| names.contains(suffix))
    })
}

/// The tensors that were found for the parameters.
pub(super) struct Matched {
    /// For each parameter, its tensor; `None` if it is missing.
    pub(super) names: Vec<Option<String>>,
    /// For tied parameters, the tensor that is used and each further copy.
    pub(super) tied: Vec<[String; 2]>,
    /// The tensors of a base, which are not used.
    pub(super) base: Vec<String>,
}

impl Matched {
    /// Looks up every parameter, and records missing parameters and tensors with the prefix that are not a parameter.
    pub(super) fn new(
        held: &BTreeMap<String, String>,
        wanted: &[Wanted],
        prefix: &str,
        differences: &mut Differences,
    ) -> Matched {
        let mut known = BTreeSet::new();
        let (mut names, mut tied, mut base) = (Vec::new(), Vec::new(), Vec::new());
        for parameter in wanted {
            let all = parameter.names.iter().map(|name| format!("{prefix}{name}"));
            let mut there = all.filter_map(|name| held.get_key_value(&name));
            if parameter.is_base {
                let there: Vec<(&String, &String)> = there.collect();
                known.extend(there.iter().map(|(key, _)| *key));
                base.extend(there.into_iter().map(|(_, tensor)| tensor.clone()));
                names.push(None);
                continue;
            }
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
        Matched { names, tied, base }
    }
}

/// Whether a tensor is not a parameter: a causal mask or rotary table, which can be derived from the configuration, or
/// extra state of a module, such as TransformerEngine's scales of 8-bit products.
pub(super) fn is_constant(name: &str) -> bool {
    if name.split('.').any(|step| step == EXTRA_STATE) {
        return true;
    }
    [".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}
