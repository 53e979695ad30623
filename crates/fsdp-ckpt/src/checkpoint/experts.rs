//! Weights of experts in two forms: one tensor for each weight of each expert, or all experts of a layer stacked.
//!
//! transformers 5 publishes the weights of Mixtral, Qwen3-MoE and others one by one (`experts.0.gate_proj.weight`, ..),
//! and stacks them in memory: `experts.gate_up_proj` of shape `[experts, 2 * inner, hidden]`, for each expert the rows of
//! the gate and then those of the up projection, and `experts.down_proj` of shape `[experts, hidden, inner]`. Whatever
//! saves a model from memory, such as FSDP2, has the stacks, and so have the states of its optimizer. A weight of one
//! expert is a range of a flattened stack, so both forms are views of the same bytes.
//!
//! gpt-oss and Granite publish stacks, too: their names of single experts are those of this project alone. gpt-oss has
//! biases; Granite's stacks and router have other names in files than in memory, and get those of files.

mod cut;
mod fused;
mod renamed;
mod separate;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::{Checkpoint, Key, OptimizerName, Role, Tensor, join, parameter_span};
use crate::error::Error;

/// The form of the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// Stacked, as transformers 5 holds them in memory; those of Granite have the names of its files.
    Fused,
    /// One by one, under the names that a family of models publishes.
    Separate(ExpertNames),
}

/// The names of experts that are stored one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNames {
    /// `block_sparse_moe.experts.0.w1.weight`, `w3` and `w2`; the router is `block_sparse_moe.gate`.
    Mixtral,
    /// `mlp.experts.0.gate_proj.weight`, `up_proj` and `down_proj`; the router is `mlp.gate`.
    Qwen,
    /// `mlp.experts.0.gate_up_proj`, `gate_up_proj_bias`, `down_proj` and `down_proj_bias`: one of each stack.
    GptOss,
    /// `block_sparse_moe.experts.0.gate_proj.weight`, `up_proj` and `down_proj`, stacked in files as
    /// `block_sparse_moe.input_linear.weight` and `output_linear.weight`; the router is `block_sparse_moe.router.layer`.
    Granite,
}

impl ExpertNames {
    /// The families of models whose experts have these forms, and differ in nothing else between memory and files.
    const MODEL_TYPES: [(ExpertNames, &'static [&'static str]); 4] = [
        (ExpertNames::GptOss, &["gpt_oss"]),
        (ExpertNames::Granite, &["granitemoe"]),
        (ExpertNames::Mixtral, &["minimax", "minimax_m2", "mixtral"]),
        (
            ExpertNames::Qwen,
            &[
                "afmoe",
                "cohere2_moe",
                "deepseek_v2",
                "deepseek_v3",
                "dots1",
                "flex_olmo",
                "glm4_moe",
                "glm4_moe_lite",
                "hunyuan_v1_moe",
                "longcat_flash",
                "mellum",
                "olmoe",
                "qwen2_moe",
                "qwen3_5_moe",
                "qwen3_5_moe_text",
                "qwen3_moe",
                "qwen3_next",
                "solar_open",
            ],
        ),
    ];

    /// All these families.
    pub(crate) fn model_types() -> impl Iterator<Item = &'static str> {
        Self::MODEL_TYPES.into_iter().flat_map(|(_, types)| types.iter().copied())
    }

    /// The names that models of this `model_type` publish; `None` if their experts are not known to have these forms.
    pub fn of_model_type(model_type: &str) -> Option<ExpertNames> {
        Self::MODEL_TYPES.into_iter().find(|(_, types)| types.contains(&model_type)).map(|(names, _)| names)
    }

    /// The names to which the parameters of a model belong; `None` if it has no experts of these forms.
    pub(crate) fn of_parameters<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<ExpertNames> {
        names.find_map(|name| Weight::parse(name).map(|weight| weight.names))
    }

    /// The module of router and experts.
    const fn module(self) -> &'static str {
        match self {
            ExpertNames::Mixtral | ExpertNames::Granite => SPARSE_MLP,
            ExpertNames::Qwen | ExpertNames::GptOss => STACKED_MLP,
        }
    }

    /// The names of the weights that an expert has in each of [`STACKS`].
    const fn words(self) -> [&'static [&'static str]; 4] {
        match self {
            ExpertNames::Mixtral => [&["w1.weight", "w3.weight"], &[], &["w2.weight"], &[]],
            ExpertNames::Qwen | ExpertNames::Granite => {
                [&["gate_proj.weight", "up_proj.weight"], &[], &["down_proj.weight"], &[]]
            }
            ExpertNames::GptOss => [&[STACKS[0]], &[STACKS[1]], &[STACKS[2]], &[STACKS[3]]],
        }
    }

    /// The module of router and experts, and the names of an expert's gate, up and down projections, where each is a
    /// matrix of its own.
    pub(crate) const fn of_linear_maps(self) -> Option<(&'static str, [&'static str; 3])> {
        match self {
            ExpertNames::Mixtral => Some((SPARSE_MLP, ["w1.weight", "w3.weight", "w2.weight"])),
            ExpertNames::Qwen => {
                Some((STACKED_MLP, ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]))
            }
            ExpertNames::GptOss | ExpertNames::Granite => None,
        }
    }

    /// Whether published files have the stacks.
    const fn are_stacked_in_files(self) -> bool {
        matches!(self, ExpertNames::GptOss | ExpertNames::Granite)
    }

    /// The prefix and the published name of a parameter that memory has beside the experts; `None` if the names are the
    /// same.
    fn published_beside(self, name: &str) -> Option<(String, String)> {
        match self {
            ExpertNames::Granite => {
                let prefix = prefix_of(name, "block_sparse_moe.router.weight")?;
                Some((prefix.to_owned(), format!("{prefix}block_sparse_moe.router.layer.weight")))
            }
            ExpertNames::Mixtral | ExpertNames::Qwen | ExpertNames::GptOss => {
                renamed_module(name, STACKED_MLP, self.module())
            }
        }
    }
}

/// The module of router and experts in published weights of some families.
const SPARSE_MLP: &str = "block_sparse_moe";

/// The module of router and experts in memory, whatever it is called in published weights; only Granite's is the same there.
const STACKED_MLP: &str = "mlp";

/// The names of the stacks, in the order of their module.
const STACKS: [&str; 4] = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"];

/// The names of Granite's stacks in files, in the same order. It has no biases.
const GRANITE_STACKS: [(&str, usize); 2] =
    [("block_sparse_moe.input_linear.weight", 0), ("block_sparse_moe.output_linear.weight", 2)];

/// The most stacks that a module of experts has.
pub(crate) const STACKS_MAX: usize = STACKS.len();

/// The number of dimensions of each of the [`STACKS`]: those of biases have no rows and columns.
const DIMS: [usize; 4] = [3, 2, 3, 2];

/// The name of one weight of one expert, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weight<'a> {
    names: ExpertNames,
    /// Everything before the module of router and experts, with its dot.
    prefix: &'a str,
    expert: u64,
    /// Index in [`STACKS`].
    stack: usize,
    /// Position among the expert's weights in the stack.
    slot: usize,
}

impl Weight<'_> {
    pub(crate) fn parse(name: &str) -> Option<Weight<'_>> {
        let (module, rest) = name.rsplit_once(".experts.")?;
        let (expert, word) = rest.split_once('.')?;
        let expert = expert.parse().ok()?;
        let all = [ExpertNames::Mixtral, ExpertNames::Qwen, ExpertNames::GptOss, ExpertNames::Granite];
        all.into_iter().find_map(|names| {
            let prefix = prefix_of(module, names.module())?;
            let in_stack = |words: &[&str]| words.iter().position(|known| *known == word);
            let (stack, slot) = (names.words().iter().enumerate())
                .find_map(|(stack, words)| Some((stack, in_stack(words)?)))?;
            Some(Weight { names, prefix, expert, stack, slot })
        })
    }

    /// Its place among the parameters of its expert.
    pub(crate) fn position(&self) -> usize {
        self.names.words()[..self.stack].iter().map(|words| words.len()).sum::<usize>() + self.slot
    }

    /// Its place in a module that holds it alone: Mixtral's has `w1`, `w2` and `w3` in this order.
    pub(crate) fn position_in_module(&self) -> usize {
        match self.names {
            ExpertNames::Mixtral => [0, 2, 1][self.position()],
            ExpertNames::Qwen | ExpertNames::GptOss | ExpertNames::Granite => self.position(),
        }
    }

    /// The number of weights that an expert has in the stack.
    pub(crate) fn slots(&self) -> usize {
        self.names.words()[self.stack].len()
    }

    /// Its place in a stack of this name.
    fn place_in(&self, stack: String) -> StackPlace {
        let slots = self.slots();
        StackPlace { stack, place: self.expert * slots as u64 + self.slot as u64, slots }
    }

    /// The name of the stack that holds it.
    pub(crate) fn stack_name(&self) -> String {
        match (self.names, GRANITE_STACKS.iter().find(|(_, stack)| *stack == self.stack)) {
            (ExpertNames::Granite, Some((name, _))) => format!("{}{name}", self.prefix),
            _ => format!("{}{STACKED_MLP}.experts.{}", self.prefix, STACKS[self.stack]),
        }
    }
}

/// A parameter's place in a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackPlace {
    /// The name of the stack.
    pub stack: String,
    /// How many parameters of the same size come before it.
    pub place: u64,
    /// How many of them each expert has.
    pub slots: usize,
}

/// The place of a parameter in a stack of published files; `None` for parameters that published files have under their own
/// names.
pub fn published_stack(parameter: &str) -> Option<StackPlace> {
    let weight = Weight::parse(parameter).filter(|weight| weight.names.are_stacked_in_files())?;
    Some(weight.place_in(weight.stack_name()))
}

/// The place of a parameter in a stack of a model in memory; `None` if it belongs to no expert.
pub fn stack_in_memory(parameter: &str) -> Option<StackPlace> {
    let weight = Weight::parse(parameter)?;
    let mlp = if weight.names == ExpertNames::Granite { SPARSE_MLP } else { STACKED_MLP };
    Some(weight.place_in(format!("{}{mlp}.experts.{}", weight.prefix, STACKS[weight.stack])))
}

/// Whether this is the name of a stack.
pub(crate) fn is_stack_of_experts(name: &str) -> bool {
    parse_stack(name).is_some()
}

/// The prefix and the index in [`STACKS`] of a stack's name.
fn parse_stack(name: &str) -> Option<(&str, usize)> {
    let Some((module, stack)) = name.rsplit_once(".experts.") else {
        return GRANITE_STACKS.iter().find_map(|(known, stack)| Some((prefix_of(name, known)?, *stack)));
    };
    let prefix = [STACKED_MLP, SPARSE_MLP].into_iter().find_map(|mlp| prefix_of(module, mlp))?;
    Some((prefix, STACKS.iter().position(|known| *known == stack)?))
}

/// The names of the single weights in a stack of files, with their expert; `None` if experts have no such stack.
pub(crate) fn weights_of_stack(
    stack: &str,
    experts: u64,
) -> Option<impl Iterator<Item = (String, u64)> + '_> {
    let stack = parse_stack(stack)?;
    Some(weights_of(stack, experts, ExpertNames::GptOss).map(|(name, expert, _)| (name, expert)))
}

/// What comes before these last steps of a name, with its dot.
fn prefix_of<'a>(name: &'a str, last: &str) -> Option<&'a str> {
    name.strip_suffix(last).filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
}

/// The names of the weights in a stack of experts, with expert and slot.
fn weights_of(
    (prefix, stack): (&str, usize),
    experts: u64,
    names: ExpertNames,
) -> impl Iterator<Item = (String, u64, usize)> {
    let (mlp, words) = (names.module(), names.words()[stack]);
    (0..experts).flat_map(move |expert| {
        let name = move |word: &&str| format!("{prefix}{mlp}.experts.{expert}.{word}");
        words.iter().enumerate().map(move |(slot, word)| (name(word), expert, slot))
    })
}

/// Replaces the module of router and experts in a name: for the router, and whatever else stands beside the experts.
/// `None` if the name is not inside of the module, or the module is called the same.
fn renamed_module(name: &str, from: &str, to: &str) -> Option<(String, String)> {
    let (prefix, rest) = match name.strip_prefix(from).and_then(|rest| rest.strip_prefix('.')) {
        Some(rest) => (String::new(), rest),
        None => {
            let (before, rest) = name.split_once(&format!(".{from}."))?;
            (format!("{before}."), rest)
        }
    };
    let renamed = format!("{prefix}{to}.{rest}");
    (from != to).then_some((prefix, renamed))
}

/// The place of a parameter's name in the path of a tensor or value, and the name.
fn parameter(path: &[Key], role: Role) -> Option<((usize, std::ops::Range<usize>), String)> {
    let (step, range) = match (role, path.last()) {
        (Role::Model, Some(Key::Name(name))) => (path.len() - 1, 0..name.len()),
        _ => parameter_span(path)?,
    };
    let Key::Name(text) = &path[step] else { return None };
    let name = text[range.clone()].to_owned();
    Some(((step, range), name))
}

impl Checkpoint {
    /// Whether a tensor of the model or of its optimizer is a stack of experts.
    pub(crate) fn has_fused_experts(&self) -> bool {
        self.tensors.values().any(|tensor| {
            let stack = parameter(&tensor.path, tensor.role);
            let stack = stack.as_ref().and_then(|(_, name)| parse_stack(name));
            stack.is_some_and(|(_, stack)| tensor.shape.len() == DIMS[stack])
        })
    }

    /// The names of the parameters of the model.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = String> {
        let model = self.tensors.values().filter(|tensor| tensor.role == Role::Model);
        model.filter_map(|tensor| Some(parameter(&tensor.path, tensor.role)?.1))
    }

    /// Returns the same checkpoint with the weights of experts in this form, together with the states and the settings
    /// of their optimizer. What has the form already remains.
    ///
    /// # Errors
    /// [`Error::BadRequest`] if weights of a stack are missing or differ in shape or dtype, if two tensors would have
    /// one name, or if the optimizer has states or settings that the other form cannot hold.
    pub fn with_experts(self, form: Experts) -> Result<Checkpoint, Error> {
        if let Some(number) = self.number_of_parameter() {
            let reason = format!(
                "its optimizer identifies parameters by number (`{number}`), and experts in another form would change \
                 all numbers: convert the model alone (`--only model`), or continue with `fsdp train --resume-from`, whose \
                 checkpoints have names"
            );
            return Err(Error::bad_request(&self.path, reason));
        }
        match form {
            Experts::Separate(names) => self.separated(names),
            Experts::Fused => self.fused(),
        }
    }

    /// The first state of a parameter that has a number instead of a name.
    fn number_of_parameter(&self) -> Option<&str> {
        let is_number = |tensor: &Tensor| match OptimizerName::of_path(&tensor.path) {
            Some(OptimizerName::State { parameter, .. }) => parameter.parse::<u64>().is_ok(),
            _ => false,
        };
        let mut states = self.tensors.iter().filter(|(_, tensor)| tensor.role == Role::Optimizer);
        states.find(|(_, tensor)| is_number(tensor)).map(|(name, _)| &name[..])
    }

    fn refused(&self, reason: String) -> Error {
        Error::bad_request(&self.path, reason)
    }

    /// Adds a tensor under the name of its path.
    fn put(&self, tensors: &mut BTreeMap<String, Tensor>, tensor: Tensor) -> Result<(), Error> {
        let name = join(&tensor.path);
        match tensors.insert(name.clone(), tensor) {
            None => Ok(()),
            Some(_) => {
                let reason =
                    format!("it holds the experts of `{name}` in both forms, stacked and one by one");
                Err(Error::bad_request(&self.path, reason))
            }
        }
    }
}
