//! Names the states of an optimizer in the folder of a rank, which are numbered.
//!
//! Megatron numbers the parameters of a rank in the order of its model: first those whose weights decay, then biases and
//! norms, which do not. Experts have an optimizer of their own.

use crate::{
    checkpoint::Value,
    formats::{
        fields::{count, field, items},
        local::LocalTensor,
    },
    torch::Item,
};

/// A state of a parameter: the index of the parameter, the name of the state, and its elements.
pub(super) type State = (usize, String, LocalTensor);

/// The states in an optimizer or a list of them, whose parameters are these in order; `None` if it has none that could be
/// those of all these parameters.
pub(super) fn states(
    optimizer: &Item,
    parameters: &[(String, LocalTensor)],
    source: usize,
) -> Option<Vec<State>> {
    let mut found = Vec::new();
    let mut named = vec![false; parameters.len()];
    let all = match optimizer {
        Item::List(all) => &all[..],
        one => std::slice::from_ref(one),
    };
    for one in all {
        let inner = one.get("optimizer").unwrap_or(one);
        let groups = inner.get("param_groups")?.to_value();
        for (number, group) in items(&groups)?.iter().enumerate() {
            let members = members(group, parameters)?;
            let numbers: Vec<u64> =
                items(field(group, "params")?)?.iter().map(count).collect::<Option<_>>()?;
            if numbers.len() != members.len() {
                return None;
            }
            for (place, (&member, number_of_state)) in members.iter().zip(numbers).enumerate() {
                if std::mem::replace(&mut named[member], true) {
                    return None;
                }
                let Item::Dict(states) = numbered(inner.get("state")?, number_of_state)? else { return None };
                let master = one.get("fp32_from_fp16_params").map(|lists| nth(nth(lists, number)?, place));
                let master = master
                    .map(|item| item.map(|item| ("fp32_param", item)))
                    .map_or(Some(None), |item| item.map(Some))?;
                let states =
                    states.iter().filter_map(|(key, item)| Some((crate::formats::fields::text(key)?, item)));
                for (state, item) in states.chain(master) {
                    let Item::Tensor(stored) = item else { continue };
                    let local = LocalTensor::of(stored, source);
                    if !local.shape.is_empty() && local.shape != parameters[member].1.shape {
                        return None;
                    }
                    found.push((member, state.to_owned(), local));
                }
            }
        }
    }
    named.iter().all(|is_named| *is_named).then_some(found)
}

/// The parameters of a group, by index.
fn members(group: &Value, parameters: &[(String, LocalTensor)]) -> Option<Vec<usize>> {
    let is_of_experts = field(group, "is_expert_parallel")? == &Value::Bool(true);
    let decays = match field(group, "wd_mult")? {
        Value::Float(factor) => *factor != 0.0,
        Value::Int(factor) => *factor != 0,
        _ => return None,
    };
    let is_member = |(name, local): &(String, LocalTensor)| {
        let has_no_decay = name.ends_with(".bias") || local.shape.len() == 1;
        name.contains(".experts.") == is_of_experts && has_no_decay != decays
    };
    Some((0..parameters.len()).filter(|&index| is_member(&parameters[index])).collect())
}

fn numbered(states: &Item, number: u64) -> Option<&Item> {
    let Item::Dict(states) = states else { return None };
    states.iter().find(|(key, _)| count(key) == Some(number)).map(|(_, state)| state)
}

fn nth(list: &Item, index: usize) -> Option<&Item> {
    match list {
        Item::List(items) => items.get(index),
        _ => None,
    }
}
