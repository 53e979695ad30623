//! The groups of the optimizer as patterns of names, with the settings of each.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_ckpt::checkpoint::Value;
use fsdp_core::model::{ModelSpec, ParamId};
use fsdp_train::audit::SavedOptimizer;

use super::folder::{Folder, number};
use super::lines::{self, Line, Lines};
use super::names;
use super::program::Program;
use crate::toml_text::strings;

/// What trainers exclude from weight decay, tried in this order where the optimizer has only numbers of parameters.
pub(super) const NO_DECAY: [&[&str]; 3] = [&[], &["norm", "ln_", "bias"], &["norm", "ln_"]];

/// Words of names that patterns are made of first.
const WORDS: [&str; 6] = ["norm", "ln_", "bias", "embed", "lm_head", "lora_"];

/// Where the settings are from.
const FROM: &str = "the optimizer's param_groups";

/// Settings of a group.
type Settings = BTreeMap<String, Value>;

/// The lines about groups of the optimizer.
#[derive(Default)]
pub(super) struct Groups {
    /// Of `[train.optimizer]`.
    pub(super) lines: Vec<Line>,
    /// Of `[[train.optimizer.group]]`.
    pub(super) tables: Vec<Lines>,
    /// Of `[fsdp]`.
    pub(super) frozen: Vec<Line>,
    /// Steps done.
    pub(super) steps: Option<u64>,
    /// The saved rate of most parameters.
    pub(super) rate: Option<f64>,
}

/// The rate and the weight decay of a group, ordered by their bits.
type Pair = [u64; 2];

impl Groups {
    /// Those whose parameters are known.
    pub(super) fn of(
        spec: &ModelSpec,
        saved: &SavedOptimizer,
        program: &Program,
        no_decay: &[String],
    ) -> Self {
        let trained = |index: &usize| spec.param(ParamId(*index)).trainable;
        let (held, rest): (Vec<usize>, Vec<usize>) =
            (0..spec.params.len()).filter(trained).partition(|&index| !saved.settings[index].is_empty());
        let mut pairs: BTreeMap<Pair, BTreeSet<usize>> = BTreeMap::new();
        for &index in &held {
            pairs.entry(pair(&saved.settings[index], program)).or_default().insert(index);
        }
        let elements =
            |set: &BTreeSet<usize>| set.iter().map(|&index| spec.param(ParamId(index)).len()).sum::<usize>();
        let Some((base, members)) = pairs.iter().max_by_key(|(_, set)| elements(set)) else {
            let open = Line::open(
                "lr",
                "1e-3",
                "the state has no settings of the optimizer; betas, eps, weight_decay, no_decay too",
            );
            return Self { lines: vec![open], steps: saved.steps, ..Self::default() };
        };
        let settings = &saved.settings[*members.first().expect("a group has members")];
        let mut groups = Self {
            lines: setting_lines(settings, program),
            steps: saved.steps,
            rate: settings.get("lr").and_then(number),
            ..Self::default()
        };
        let [rate, decay] = base.map(f64::from_bits);
        let mut undecayed = None;
        for (other, set) in pairs.iter().filter(|(other, _)| *other != base) {
            let [other_rate, other_decay] = other.map(f64::from_bits);
            if other_rate.to_bits() == rate.to_bits() && other_decay == 0.0 {
                undecayed = Some(set);
                continue;
            }
            let mut lines = vec![Line::known("patterns", strings(&patterns(spec, set)), FROM)];
            lines.push(Line::known("lr", lines::number(other_rate), program.rate_from(settings)));
            lines.push(Line::known("weight_decay", lines::number(other_decay), FROM));
            groups.tables.push(Lines(lines));
        }
        groups.lines.extend(differing(held.iter().map(|&index| &saved.settings[index])));
        if let Some(set) = undecayed {
            let what = "the group whose weight_decay is 0";
            groups.lines.push(Line::known(
                "no_decay",
                strings(&patterns(spec, set)),
                format!("{FROM}: {what}"),
            ));
        } else if decay == 0.0 && !no_decay.is_empty() {
            let what = "without decay, these only tell the two groups of the saved state apart";
            groups.lines.push(Line::known("no_decay", strings(no_decay), what));
        }
        if !rest.is_empty() {
            let frozen = patterns(spec, &rest.into_iter().collect());
            groups.frozen.push(Line::known(
                "frozen",
                strings(&frozen),
                "they are in no group of the optimizer",
            ));
        }
        groups
    }

    /// Those of a state that could not be matched with a model: the settings of the first group.
    pub(super) fn unmatched(folder: &Folder, program: &Program, reason: &str) -> Self {
        let mut groups = Self::default();
        if let Some(first) = folder.groups.first() {
            groups.lines = setting_lines(first, program);
            groups.rate = first.get("lr").and_then(number);
        }
        let what = match folder.groups.len() {
            0 => "lr, betas, eps and weight_decay, too: the state has no settings of the optimizer",
            1 => "if there are parameters without weight decay",
            _ => "the settings above are those of the first group; those of others may differ",
        };
        groups.lines.push(Line::open("no_decay", "[\"norm\", \"bias\"]", what));
        let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        if !reason.is_empty() {
            groups.lines.push(Line::note(format!("The parameters of each group are not known: {reason}")));
        }
        groups
    }
}

fn pair(settings: &Settings, program: &Program) -> Pair {
    let decay = settings.get("weight_decay").and_then(number).unwrap_or(0.0);
    [program.rate(settings).unwrap_or(0.0).to_bits(), decay.to_bits()]
}

/// Says which settings differ between groups, though a run file has one for all.
fn differing<'s>(mut settings: impl Iterator<Item = &'s Settings>) -> Vec<Line> {
    const KEYS: [&str; 5] = ["betas", "eps", "momentum", "dampening", "nesterov"];
    let Some(first) = settings.next() else { return Vec::new() };
    let mut keys = BTreeSet::new();
    settings.for_each(|other| keys.extend(KEYS.into_iter().filter(|key| other.get(*key) != first.get(*key))));
    let text =
        |key| format!("Groups have other {key}, and a run file has one for all: the others will be findings");
    keys.into_iter().map(|key| Line::note(text(key))).collect()
}

/// The settings that all groups share, except for `no_decay`.
fn setting_lines(settings: &Settings, program: &Program) -> Vec<Line> {
    let mut lines = Vec::new();
    match program.rate(settings) {
        Some(rate) => lines.push(Line::known("lr", lines::number(rate), program.rate_from(settings))),
        None => lines.push(Line::open("lr", "1e-3", "the groups of the optimizer have no lr")),
    }
    if let Some(Value::List(betas) | Value::Tuple(betas)) = settings.get("betas") {
        let betas: Vec<String> = betas.iter().filter_map(number).map(lines::number).collect();
        lines.push(Line::known("betas", format!("[{}]", betas.join(", ")), FROM));
    }
    for key in ["eps", "momentum", "dampening", "weight_decay"] {
        let value = settings.get(key).and_then(number).filter(|value| key != "dampening" || *value != 0.0);
        lines.extend(value.map(|value| Line::known(key, lines::number(value), FROM)));
    }
    if settings.get("nesterov") == Some(&Value::Bool(true)) {
        lines.push(Line::known("nesterov", true, FROM));
    }
    lines
}

/// Patterns that match these parameters of the model and no other: words of their names where they do, else whole names.
pub(super) fn patterns(spec: &ModelSpec, wanted: &BTreeSet<usize>) -> Vec<String> {
    let has = |index: usize, word: &str| names(spec, index).any(|name| name.contains(word));
    let fits = |word: &str| {
        let mut found = (0..spec.params.len()).filter(|&index| has(index, word)).peekable();
        found.peek().is_some() && found.all(|index| wanted.contains(&index))
    };
    let mut left = wanted.clone();
    let mut chosen = Vec::new();
    let parts = wanted.iter().flat_map(|&index| parts_of(&spec.param(ParamId(index)).fqn));
    for word in WORDS.map(str::to_owned).into_iter().chain(parts) {
        if left.iter().any(|&index| has(index, &word)) && fits(&word) {
            left.retain(|&index| !has(index, &word));
            chosen.push(word.replace('.', "\\."));
        }
    }
    chosen.extend(
        left.into_iter().map(|index| format!("^{}$", spec.param(ParamId(index)).fqn.replace('.', "\\."))),
    );
    chosen
}

/// Parts of a name that may stand for it: its steps, and a step with the number after it (`layers.3.`).
fn parts_of(name: &str) -> Vec<String> {
    let steps: Vec<&str> = name.split('.').collect();
    let is_number = |step: &str| step.bytes().all(|byte| byte.is_ascii_digit());
    let numbered =
        steps.windows(2).filter(|two| is_number(two[1])).map(|two| format!("{}.{}.", two[0], two[1]));
    let plain = steps.iter().filter(|step| !is_number(step)).map(|&step| step.to_owned());
    numbered.chain(plain).collect()
}

#[cfg(test)]
mod tests;
