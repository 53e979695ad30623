//! Wrap policies: which parameters are gathered together.
//!
//! A unit is the set of parameters of one wrapped module, without those of wrapped modules inside it; the root unit
//! holds the rest. Modules are selected by class name, or by Hugging Face's size-based recursion
//! (`size_based_auto_wrap_policy`): from the leaves up, a module is wrapped when its parameters that are not yet
//! wrapped number at least the minimum and it is not a container of modules; `MultiheadAttention` and its descendants
//! are never wrapped.

pub use crate::id::UnitId;

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Error;
use crate::model::{ModelSpec, ParamId, ParamSpec};

/// Classes that a size-based policy never wraps: their modules are only iterated over, never called.
const CONTAINERS: [&str; 2] = ["ModuleList", "ModuleDict"];
/// The class whose modules a size-based policy neither wraps nor descends into.
const LEAF: &str = "MultiheadAttention";

/// The rule that selects the wrapped modules.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WrapPolicy {
    /// Every module of one of these classes is a unit.
    Classes(Vec<String>),
    /// Every module with at least this many parameters, not counting those in units further inside.
    MinParams(usize),
}

/// Parameters that are gathered together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Unit {
    /// FQN of the wrapped module; `(root)` for the root.
    pub name: String,
    /// Whether this is the root unit.
    pub is_root: bool,
    /// The parameters, in the order of the model; those of experts in the order of the experts.
    pub params: Vec<ParamId>,
    /// The number of the unit that it was part of before its experts became a unit of their own.
    pub origin: usize,
    /// Number of blocks of experts that it is divided into, one after the other; 1 if it is not.
    pub blocks: usize,
}

/// Partitions the model into units, the root first, the others in module order.
///
/// # Errors
/// [`Error::WrapClass`] for a class that no module has; [`Error::TiedAcrossUnits`] when the uses of a tied parameter
/// would belong to different units; [`Error::Model`].
pub fn units(spec: &ModelSpec, policy: &WrapPolicy) -> Result<Vec<Unit>, Error> {
    spec.validate()?;
    let wrapped = match policy {
        WrapPolicy::Classes(classes) => by_class(spec, classes)?,
        WrapPolicy::MinParams(min) => by_size(spec, *min),
    };
    check_tied(spec, &wrapped)?;
    let mut params: BTreeMap<usize, Vec<ParamId>> = BTreeMap::new();
    for (index, module) in spec.modules.iter().enumerate() {
        params.entry(owner(spec, &wrapped, index)).or_default().extend(&module.params);
    }
    Ok(params
        .into_iter()
        .filter(|(_, params)| !params.is_empty())
        .enumerate()
        .map(|(origin, (index, mut params))| {
            params.sort();
            let name = unit_name(spec, index);
            Unit { name, is_root: index == 0, params, origin, blocks: 1 }
        })
        .collect())
}

/// Makes the experts of every unit a unit of their own, divided into as many blocks as the expert axis has ranks. Units that
/// have experts of the same mixture become one.
///
/// # Errors
/// [`Error::Policy`] if there are no experts, or those of a unit cannot be divided into blocks that are alike.
pub fn with_blocks(spec: &ModelSpec, units: Vec<Unit>, blocks: usize) -> Result<Vec<Unit>, Error> {
    if blocks == 1 {
        return Ok(units);
    }
    let mixture_of = mixtures(spec);
    if mixture_of.is_empty() {
        return Err(cannot_divide(blocks, "must be 1: the model has no mixtures of experts".into()));
    }
    let mut divided: Vec<Unit> = Vec::new();
    // The units that have the experts of each mixture.
    let mut holders: BTreeMap<usize, usize> = BTreeMap::new();
    for unit in units {
        let (experts, params): (Vec<ParamId>, Vec<ParamId>) =
            unit.params.iter().partition(|id| mixture_of.contains_key(id));
        let Unit { ref name, is_root, origin, .. } = unit;
        let own = Unit { name: format!("experts of {name}"), is_root, params: Vec::new(), origin, blocks };
        if !params.is_empty() {
            divided.push(Unit { params, ..unit });
        }
        let mixtures: BTreeSet<usize> = experts.iter().map(|id| mixture_of[id]).collect();
        let Some(&first) = mixtures.first() else { continue };
        let holder = mixtures.iter().find_map(|mixture| holders.get(mixture)).copied();
        match holder {
            Some(holder) => divided[holder].name = format!("experts of {}", spec.blocks[first].name),
            None => divided.push(own),
        }
        let holder = holder.unwrap_or(divided.len() - 1);
        divided[holder].params.extend(experts);
        holders.extend(mixtures.into_iter().map(|mixture| (mixture, holder)));
    }
    for unit in divided.iter_mut().filter(|unit| unit.blocks > 1) {
        unit.params.sort_by_key(|&id| (spec.param(id).expert, id));
        expect_alike(spec, unit)?;
    }
    Ok(divided)
}

/// The block that computes each parameter of an expert.
fn mixtures(spec: &ModelSpec) -> BTreeMap<ParamId, usize> {
    let blocks = spec.blocks.iter().enumerate();
    let experts = blocks.flat_map(|(mixture, block)| block.params.iter().map(move |&id| (id, mixture)));
    experts.filter(|(id, _)| spec.param(*id).expert.is_some()).collect()
}

/// Checks that the blocks of a unit have the same shapes.
fn expect_alike<'a>(spec: &'a ModelSpec, unit: &Unit) -> Result<(), Error> {
    let kind = |param: &'a ParamSpec| (&param.shape[..], param.trainable, param.quantized, param.keep_f32);
    let alike = |of: &[ParamId]| of.iter().map(|&id| kind(spec.param(id))).collect::<Vec<_>>();
    let mut experts = unit.params.chunk_by(|&a, &b| spec.param(a).expert == spec.param(b).expert).map(alike);
    let (count, first) = (experts.clone().count(), experts.next());
    if !count.is_multiple_of(unit.blocks) {
        let nearest = (1..=unit.blocks).rev().find(|blocks| count.is_multiple_of(*blocks)).unwrap_or(1);
        let expected = format!("must divide the number of {}, {count}, as {nearest} does", unit.name);
        return Err(cannot_divide(unit.blocks, expected));
    }
    if experts.all(|expert| Some(expert) == first) {
        return Ok(());
    }
    let why = "must be alike, in their shapes and in what is trained, to be divided";
    Err(cannot_divide(unit.blocks, format!("{} {why}", unit.name)))
}

fn cannot_divide(blocks: usize, expected: String) -> Error {
    Error::Policy { key: "mesh.expert", value: blocks.to_string(), expected }
}

fn unit_name(spec: &ModelSpec, module: usize) -> String {
    if module == 0 { "(root)".into() } else { spec.modules[module].fqn.clone() }
}

/// The innermost wrapped module that contains a module or is the module itself; the root is always wrapped.
fn owner(spec: &ModelSpec, wrapped: &[bool], module: usize) -> usize {
    let mut at = module;
    while !wrapped[at] {
        at = spec.modules[at].parent.expect("the root module is always wrapped");
    }
    at
}

fn by_class(spec: &ModelSpec, classes: &[String]) -> Result<Vec<bool>, Error> {
    for class in classes {
        if !spec.modules.iter().any(|module| module.class == *class) {
            let mut known: Vec<String> = spec.modules.iter().map(|module| module.class.clone()).collect();
            known.sort();
            known.dedup();
            return Err(Error::WrapClass { class: class.clone(), known });
        }
    }
    Ok(spec.modules.iter().map(|m| m.parent.is_none() || classes.contains(&m.class)).collect())
}

fn by_size(spec: &ModelSpec, min: usize) -> Vec<bool> {
    let mut wrapped = vec![false; spec.modules.len()];
    let mut unwrapped = vec![0usize; spec.modules.len()];
    // Children are listed after their parents, so the reverse order visits children first.
    for (index, module) in spec.modules.iter().enumerate().rev() {
        unwrapped[index] += module.params.iter().map(|&id| spec.param(id).len()).sum::<usize>();
        let fits = !CONTAINERS.contains(&module.class.as_str()) && !within_leaf(spec, index);
        wrapped[index] = index == 0 || (unwrapped[index] >= min && unwrapped[index] > 0 && fits);
        if let (false, Some(parent)) = (wrapped[index], module.parent) {
            unwrapped[parent] += unwrapped[index];
        }
    }
    wrapped
}

/// Whether a module is, or is inside, one that a size-based policy does not descend into.
fn within_leaf(spec: &ModelSpec, module: usize) -> bool {
    let mut self_and_ancestors = std::iter::successors(Some(module), |&at| spec.modules[at].parent);
    self_and_ancestors.any(|at| spec.modules[at].class == LEAF)
}

/// Checks that the uses of every tied parameter are in one unit. The parameter belongs to the module of its first name;
/// its aliases name the other modules that use it.
fn check_tied(spec: &ModelSpec, wrapped: &[bool]) -> Result<(), Error> {
    for (index, module) in spec.modules.iter().enumerate() {
        for &id in &module.params {
            let param = spec.param(id);
            for alias in &param.aliases {
                let (first, second) =
                    (owner(spec, wrapped, index), owner(spec, wrapped, module_of(spec, alias)));
                if first != second {
                    return Err(Error::TiedAcrossUnits {
                        param: param.fqn.clone(),
                        alias: alias.clone(),
                        first: unit_name(spec, first),
                        second: unit_name(spec, second),
                    });
                }
            }
        }
    }
    Ok(())
}

/// The innermost module whose FQN is a prefix of a parameter's FQN.
fn module_of(spec: &ModelSpec, fqn: &str) -> usize {
    let mut best = 0;
    for (index, module) in spec.modules.iter().enumerate() {
        let inside = fqn.strip_prefix(&module.fqn).is_some_and(|rest| rest.starts_with('.'));
        if inside && module.fqn.len() > spec.modules[best].fqn.len() {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests;
