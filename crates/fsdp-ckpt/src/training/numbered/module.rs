//! The parameters of PyTorch's module in its own order, which is that of their numbers.
//!
//! It is the order of the wanted parameters with few exceptions. An adapter of PEFT stands with the linear map that it
//! belongs to. Mixtral's experts have `w1`, `w2` and `w3` where a gated MLP has gate, up and down. transformers 5 stacks
//! the experts of a layer, before the router in some families and after it in others.

use std::collections::BTreeMap;

use crate::{
    checkpoint::{ExpertWeight, STACKS_MAX, is_stack_of_experts},
    training::Wanted,
};

/// A parameter of the module.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    /// Its name in the module.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Indices of the wanted parameters that it holds: several for a stack of experts.
    pub(super) wanted: Vec<usize>,
    pub(super) is_trained: bool,
    /// Whether weight decay applies to it; `None` if to a part of it.
    pub(super) decays: Option<bool>,
}

impl Parameter {
    fn of(index: usize, wanted: &Wanted) -> Parameter {
        Parameter {
            name: wanted.names[0].clone(),
            shape: wanted.shape.clone(),
            wanted: vec![index],
            is_trained: !wanted.states.is_empty(),
            decays: Some(wanted.decays),
        }
    }

    /// Adds one weight of one expert to a stack.
    fn add(&mut self, index: usize, wanted: &Wanted) {
        self.wanted.push(index);
        self.is_trained |= !wanted.states.is_empty();
        if self.decays != Some(wanted.decays) {
            self.decays = None;
        }
    }
}

/// The parameters one by one.
pub(super) fn published(wanted: &[Wanted]) -> Vec<Parameter> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_cached_key(|&index| place(wanted, index));
    order.into_iter().map(|index| Parameter::of(index, &wanted[index])).collect()
}

/// Where the module has a parameter: the place of the linear map or of the expert that it belongs to, and its own there.
fn place(wanted: &[Wanted], index: usize) -> (usize, usize) {
    let name = &wanted[index].names[0];
    let place_of = |name: &str| wanted.iter().position(|one| one.names[0] == name);
    let adapters = [".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"].into_iter().enumerate();
    for (number, ending) in adapters {
        if let Some(module) = name.strip_suffix(ending)
            && let Some(base) = place_of(&format!("{module}.weight"))
        {
            // A bias of the linear map comes first.
            let bias = place_of(&format!("{module}.bias")).unwrap_or(base);
            return (base.max(bias), 1 + number);
        }
    }
    match ExpertWeight::parse(name) {
        // All weights of an expert follow each other.
        Some(weight) => (index - weight.position(), weight.position_in_module()),
        None => (index, 0),
    }
}

/// The parameters with the experts of each layer stacked, in all orders that modules have. Empty if there are no experts.
pub(super) fn stacked(wanted: &[Wanted]) -> Vec<Vec<Parameter>> {
    let mut parameters: Vec<Parameter> = Vec::new();
    let mut slots = BTreeMap::new();
    for (index, one) in wanted.iter().enumerate() {
        let Some(weight) = ExpertWeight::parse(&one.names[0]) else {
            parameters.push(Parameter::of(index, one));
            continue;
        };
        let name = weight.stack_name();
        match parameters.iter_mut().rev().take(STACKS_MAX).find(|held| held.name == name) {
            Some(stack) => stack.add(index, one),
            None => parameters.push(Parameter { name, ..Parameter::of(index, one) }),
        }
        slots.insert(weight.stack_name(), weight.slots());
    }
    if slots.is_empty() {
        return Vec::new();
    }
    for stack in &mut parameters {
        let Some(&slots) = slots.get(&stack.name) else { continue };
        let experts = stack.wanted.len() / slots;
        match stack.shape[..] {
            [rows, columns] => stack.shape = vec![experts, slots * rows, columns],
            [columns] => stack.shape = vec![experts, columns],
            _ => {}
        }
    }
    let mut routers_last = parameters.clone();
    for first in 0..routers_last.len().saturating_sub(2) {
        let is_stack = |one: &Parameter| is_stack_of_experts(&one.name);
        if let [router, gate_up, down] = &routers_last[first..first + 3]
            && !is_stack(router)
            && is_stack(gate_up)
            && is_stack(down)
        {
            routers_last[first..first + 3].rotate_left(1);
        }
    }
    vec![parameters, routers_last]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(name: &str, shape: &[usize]) -> Wanted {
        let states = vec![("exp_avg".to_owned(), shape.to_vec())];
        let (names, shape) = (vec![name.to_owned()], shape.to_vec());
        Wanted { names, shape, states, decays: true, may_lack_states: true, is_base: false }
    }

    /// The names of parameters, each with the wanted ones that it holds.
    fn order(parameters: &[Parameter]) -> Vec<(&str, &[usize])> {
        parameters.iter().map(|one| (&one.name[..], &one.wanted[..])).collect()
    }

    /// A layer with two experts whose projections are called so, of hidden size 4 and inner size 3.
    fn layer(mlp: &str, words: [&str; 3]) -> Vec<Wanted> {
        let mut all = vec![wanted("l.q.weight", &[4, 4]), wanted(&format!("l.{mlp}.gate.weight"), &[2, 4])];
        for expert in 0..2 {
            for (word, shape) in words.iter().zip([[3, 4], [3, 4], [4, 3]]) {
                all.push(wanted(&format!("l.{mlp}.experts.{expert}.{word}.weight"), &shape));
            }
        }
        all.push(wanted("l.norm.weight", &[4]));
        all
    }

    #[test]
    fn experts_are_in_the_order_of_their_module() {
        let qwen = layer("mlp", ["gate_proj", "up_proj", "down_proj"]);
        assert!(published(&qwen).iter().enumerate().all(|(index, one)| one.wanted == [index]));
        let mixtral = layer("block_sparse_moe", ["w1", "w3", "w2"]);
        let numbers: Vec<usize> = published(&mixtral).iter().map(|one| one.wanted[0]).collect();
        assert_eq!(numbers, [0, 1, 2, 4, 3, 5, 7, 6, 8]);
    }

    #[test]
    fn stacks_stand_before_or_after_their_router() {
        for mut one in [
            layer("mlp", ["gate_proj", "up_proj", "down_proj"]),
            layer("block_sparse_moe", ["w1", "w3", "w2"]),
        ] {
            one[8].decays = false;
            let router = one[1].names[0].clone();
            let [first, last] = &stacked(&one)[..] else { panic!("two orders") };
            let gate_up = ("l.mlp.experts.gate_up_proj", &[2, 3, 5, 6][..]);
            let down = ("l.mlp.experts.down_proj", &[4, 7][..]);
            let (q, gate, norm) =
                (("l.q.weight", &[0][..]), (&router[..], &[1][..]), ("l.norm.weight", &[8][..]));
            assert_eq!(order(first), [q, gate, gate_up, down, norm]);
            assert_eq!(order(last), [q, gate_up, down, gate, norm]);
            assert_eq!((&first[2].shape[..], &first[3].shape[..]), (&[2, 6, 4][..], &[2, 4, 3][..]));
            assert!(first[2].is_trained && first[2].decays == Some(true));
            // A stack whose experts decay only in part belongs to no group.
            one[5].decays = false;
            assert_eq!(stacked(&one)[0][2].decays, None);
            one[5].states.clear();
            assert!(stacked(&one)[0][2].is_trained);
        }
        assert!(stacked(&[wanted("l.q.weight", &[4])]).is_empty());
    }

    #[test]
    fn adapters_stand_with_their_linear_map() {
        let names = [
            "embed.weight",
            "l.q.weight",
            "l.q.bias",
            "l.v.weight",
            "head.weight",
            "l.q.lora_A.weight",
            "l.q.lora_B.weight",
            "l.v.lora_A.weight",
            "l.v.lora_B.weight",
            "l.q.lora_magnitude_vector",
            "l.v.lora_magnitude_vector",
        ];
        let all: Vec<Wanted> = names.iter().map(|name| wanted(name, &[4])).collect();
        let numbers: Vec<usize> = published(&all).iter().map(|one| one.wanted[0]).collect();
        assert_eq!(numbers, [0, 1, 2, 5, 6, 9, 3, 7, 8, 10, 4]);
    }
}
