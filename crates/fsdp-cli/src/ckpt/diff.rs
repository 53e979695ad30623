//! `fsdp ckpt diff`: compares two checkpoints, tensor by tensor.

use std::collections::BTreeMap;

use fsdp_ckpt::checkpoint::Checkpoint;
use fsdp_ckpt::conversion::Part;
use fsdp_ckpt::diff::{Deviation, Diff, Outcome, Tolerance, diff};
use fsdp_ckpt::safetensors::TensorType;
use serde_json::{Value as Json, json};

use super::shared::{Work, is_in, json_path, listed, opaque_note};
use super::values;
use crate::args::DiffArgs;
use crate::document::{Document, Mark, Report, json, print};
use crate::error::CliError;
use crate::units::counted;

/// Compares two checkpoints, prints the report and returns whether they are equal.
///
/// # Errors
/// [`CliError`]: a checkpoint cannot be read or is damaged, or the user interrupted.
pub(super) fn run(args: &DiffArgs) -> Result<bool, CliError> {
    let work = Work::begin(args.memory)?;
    let part = args.only;
    let sides = [open(args, part, 0)?, open(args, part, 1)?];
    let (sides, under) = unwrap_key(sides)?;
    let tolerance = Tolerance { atol: args.atol, rtol: args.rtol };
    let found = work.run(|options| diff(&sides[0], &sides[1], tolerance, options))?;
    let compared = Compared { sides: &sides, found: &found, under: under.as_ref() };
    print(&compared, args.json)?;
    Ok(compared.is_equal())
}

/// A side that holds the other side's state under a key.
struct Under {
    side: usize,
    key: String,
    /// Number of tensors that are not under the key.
    others: usize,
}

/// If no name is on both sides, one of them may hold the other's state under a key; then that state is compared.
fn unwrap_key(sides: [Checkpoint; 2]) -> Result<([Checkpoint; 2], Option<Under>), CliError> {
    let [a, b] = sides;
    if a.tensors.keys().any(|name| b.tensors.contains_key(name)) {
        return Ok(([a, b], None));
    }
    let under = |side, key: String, total: usize, found: &Checkpoint| {
        Some(Under { side, key, others: total - found.tensors.len() })
    };
    if let Some(key) = a.key_of_all(&b) {
        let total = a.tensors.len();
        let a = a.under(&key)?;
        let under = under(0, key, total, &a);
        return Ok(([a, b], under));
    }
    if let Some(key) = b.key_of_all(&a) {
        let total = b.tensors.len();
        let b = b.under(&key)?;
        let under = under(1, key, total, &b);
        return Ok(([a, b], under));
    }
    Ok(([a, b], None))
}

fn open(args: &DiffArgs, part: Part, side: usize) -> Result<Checkpoint, CliError> {
    let mut checkpoint = super::shared::open([&args.first, &args.second][side], &args.reading)?;
    if args.strip_wrappers {
        checkpoint = checkpoint.strip_wrappers()?;
    }
    checkpoint.tensors.retain(|_, tensor| is_in(tensor.role, part));
    checkpoint.values.retain(|_, object| is_in(object.role, part));
    if checkpoint.tensors.is_empty() && part != Part::All {
        let what = format!("{} has no such tensors; leave it out", checkpoint.path.display());
        return Err(CliError::Option { option: "--only", what });
    }
    Ok(checkpoint)
}

/// The comparison to report.
struct Compared<'a> {
    sides: &'a [Checkpoint; 2],
    found: &'a Diff,
    under: Option<&'a Under>,
}

impl Compared<'_> {
    /// Run state values that differ, by name; empty if none differ.
    fn states(&self) -> BTreeMap<&String, [Option<&String>; 2]> {
        let mut states: BTreeMap<&String, [Option<&String>; 2]> = BTreeMap::new();
        for (number, side) in self.sides.iter().enumerate() {
            for (key, value) in &side.run_state {
                states.entry(key).or_default()[number] = Some(value);
            }
        }
        let is_shown =
            !self.found.values.is_empty() && self.sides.iter().all(|side| !side.run_state.is_empty());
        states.retain(|_, [a, b]| is_shown && a != b);
        states
    }

    /// Whether nothing differs and there are no tensors outside of the compared part.
    fn is_equal(&self) -> bool {
        self.found.is_equal() && self.under.is_none_or(|under| under.others == 0)
    }

    /// The part of a side that was compared; empty if all of it was.
    fn under_text(&self) -> String {
        let Some(Under { side, key, others }) = self.under else { return String::new() };
        let name = ["A", "B"][*side];
        match others {
            0 => format!(" under `{key}.` of {name}"),
            _ => format!(" under `{key}.` of {name}, which also has {}", counted(*others, "tensor")),
        }
    }

    fn verdict(&self) -> String {
        let under = self.under_text();
        let mut counts: BTreeMap<(bool, String), usize> = BTreeMap::new();
        for outcome in self.found.tensors.values() {
            *counts.entry((!outcome.is_equal(), name(outcome))).or_default() += 1;
        }
        let counts: Vec<String> = counts.iter().map(|((_, text), count)| format!("{count} {text}")).collect();
        let tensors = format!("{} ({})", counted(self.found.tensors.len(), "tensor"), counts.join(", "));
        let values = counted(self.found.values.len(), "value");
        if self.is_equal() {
            format!("no difference{under}: {tensors}")
        } else if self.found.is_equal() {
            format!("equal{under}: {tensors}")
        } else if self.found.tensors.values().all(Outcome::is_equal) {
            format!("they differ in {values}; no tensor differs: {tensors}")
        } else if self.found.values.is_empty() {
            format!("they differ{under}: {tensors}")
        } else {
            format!("they differ: {tensors}, and {values}")
        }
    }
}

impl Report for Compared<'_> {
    fn json(&self) -> Json {
        let side = |side: &Checkpoint| json!({"path": json_path(&side.path), "format": side.format});
        let name = |side: usize| ["first", "second"][side];
        let under = |under: &Under| json!({"side": name(under.side), "key": under.key});
        json!({
            "equal": self.is_equal(),
            "first": side(&self.sides[0]),
            "second": side(&self.sides[1]),
            "tensors": self.found.tensors,
            "values": self.found.values,
            "run_state": self.states(),
            "under": self.under.map(under),
        })
    }

    fn write(&self, to: &mut dyn Document) {
        for (name, side) in ["A", "B"].into_iter().zip(self.sides) {
            to.pair(name, format!("{} ({})", side.path.display(), side.format));
        }
        to.each(Mark::Warning, "note:", self.sides.iter().filter_map(opaque_note));
        let header = ["tensor", "outcome", "types or shapes", "differing", "by up to", "at element"];
        to.table_of_any(header, self.found.tensors.iter().filter_map(row));
        let shown = |value: Option<&String>| value.map_or_else(String::new, |value| values::short(value));
        let states = self.states().into_iter().map(|(key, [a, b])| [key.clone(), shown(a), shown(b)]);
        to.table_of_any(["state of the run", "A", "B"], states);
        if !self.found.is_equal() {
            for note in self.sides.iter().filter_map(Checkpoint::wrapper_note) {
                to.gap();
                to.each(Mark::Warning, "note:", [note]);
            }
        }
        if !self.found.values.is_empty() {
            to.gap();
            to.line(&format!("values that differ: {}", listed(&self.found.values)));
        }
        to.gap();
        to.marked(if self.is_equal() { Mark::Good } else { Mark::Bad }, &self.verdict(), "");
    }
}

/// The name of an outcome.
fn name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::OnlyInFirst => "only in A".to_owned(),
        Outcome::OnlyInSecond => "only in B".to_owned(),
        _ => json(outcome)["outcome"].as_str().unwrap_or_default().replace('_', " "),
    }
}

/// The row of a tensor; `None` if its bits are equal on both sides.
fn row((tensor, outcome): (&String, &Outcome)) -> Option<[String; 6]> {
    let types = |[a, b]: &[TensorType; 2]| if a == b { a.to_string() } else { format!("{a}, {b}") };
    let none = String::new;
    let rest = match outcome {
        Outcome::EqualBits => return None,
        Outcome::EqualValues { dtypes } => [types(dtypes), none(), "0".to_owned(), none()],
        Outcome::TypesDiffer { dtypes } => [types(dtypes), none(), none(), none()],
        Outcome::WithinTolerance(deviation) | Outcome::Differs(deviation) => {
            let Deviation { dtypes, differing, largest, at, .. } = deviation;
            [types(dtypes), differing.to_string(), format!("{largest:.3e}"), at.to_string()]
        }
        Outcome::BitsDiffer { differing, at } => [none(), differing.to_string(), none(), at.to_string()],
        Outcome::ShapesDiffer { shapes: [a, b] } => [format!("{a:?}, {b:?}"), none(), none(), none()],
        Outcome::OnlyInFirst | Outcome::OnlyInSecond => [none(), none(), none(), none()],
    };
    let [types, differing, largest, at] = rest;
    Some([tensor.clone(), name(outcome), types, differing, largest, at])
}
