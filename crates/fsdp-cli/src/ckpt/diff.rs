//! `fsdp ckpt diff`: compares two checkpoints, tensor by tensor.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;

use fsdp_ckpt::checkpoint::Checkpoint;
use fsdp_ckpt::conversion::Part;
use fsdp_ckpt::diff::{Deviation, Diff, Outcome, Tolerance, diff};
use fsdp_ckpt::safetensors::TensorType;
use serde_json::{Map, Value as Json, json};

use super::{Work, counted, is_in, json_path, line, listed, opaque_note, print, values};
use crate::args::DiffArgs;
use crate::error::CliError;
use crate::output::{Paint, one_line, table};

/// Compares two checkpoints, prints the report and returns whether they are equal.
///
/// # Errors
/// [`CliError`]: a checkpoint cannot be read or is damaged, or the user interrupted.
pub(super) fn run(args: &DiffArgs) -> Result<bool, CliError> {
    let work = Work::begin(args.memory)?;
    let part = args.only.into();
    let sides = [open(args, part, 0)?, open(args, part, 1)?];
    let (sides, under) = unwrap_key(sides)?;
    let tolerance = Tolerance { atol: args.atol, rtol: args.rtol };
    let found = work.run(|options| diff(&sides[0], &sides[1], tolerance, options))?;
    let report = Report { sides: &sides, found: &found, under: under.as_ref() };
    print(args.json, || report.json(), || report.text(Paint::of(&io::stdout())))?;
    Ok(report.is_equal())
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
    let mut checkpoint = super::open([&args.first, &args.second][side], &args.reading)?;
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
struct Report<'a> {
    sides: &'a [Checkpoint; 2],
    found: &'a Diff,
    under: Option<&'a Under>,
}

impl Report<'_> {
    fn text(&self, paint: Paint) -> String {
        let mut text = String::new();
        for (name, side) in ["A", "B"].into_iter().zip(self.sides) {
            line(&mut text, name, &format!("{} ({})", side.path.display(), side.format));
        }
        for note in self.sides.iter().flat_map(opaque_note) {
            let _ = writeln!(text, "{} {}", paint.warning("note:"), one_line(&note));
        }
        let rows: Vec<[String; 6]> = self.found.tensors.iter().filter_map(row).collect();
        if !rows.is_empty() {
            let header = ["tensor", "outcome", "types or shapes", "differing", "by up to", "at element"];
            let _ = write!(text, "\n{}", table(header, rows));
        }
        let states = self.states();
        if !states.is_empty() {
            let shown = |value: Option<&String>| value.map_or_else(String::new, |value| values::short(value));
            let rows = states.into_iter().map(|(key, [a, b])| [key.clone(), shown(a), shown(b)]);
            let _ = write!(text, "\n{}", table(["state of the run", "A", "B"], rows));
        }
        if !self.found.is_equal() {
            for note in self.sides.iter().filter_map(Checkpoint::wrapper_note) {
                let _ = writeln!(text, "\n{} {}", paint.warning("note:"), one_line(&note));
            }
        }
        if !self.found.values.is_empty() {
            let _ = writeln!(text, "\nvalues that differ: {}", one_line(&listed(&self.found.values)));
        }
        let _ = writeln!(text, "\n{}", self.verdict(paint));
        text
    }

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

    fn verdict(&self, paint: Paint) -> String {
        let under = self.under_text();
        let mut counts: BTreeMap<(bool, String), usize> = BTreeMap::new();
        for outcome in self.found.tensors.values() {
            *counts.entry((!outcome.is_equal(), outcome_text(outcome))).or_default() += 1;
        }
        let counts: Vec<String> = counts.iter().map(|((_, text), count)| format!("{count} {text}")).collect();
        let counts = counts.join(", ");
        let tensors = counted(self.found.tensors.len(), "tensor");
        let values = match self.found.values.len() {
            0 => String::new(),
            count => counted(count, "value"),
        };
        if self.is_equal() {
            paint.good(&format!("no difference{under}: {tensors} ({counts})"))
        } else if self.found.is_equal() {
            paint.bad(&format!("equal{under}: {tensors} ({counts})"))
        } else if self.found.tensors.values().all(Outcome::is_equal) {
            paint.bad(&format!("they differ in {values}; no tensor differs: {tensors} ({counts})"))
        } else if values.is_empty() {
            paint.bad(&format!("they differ{under}: {tensors} ({counts})"))
        } else {
            paint.bad(&format!("they differ: {tensors} ({counts}), and {values}"))
        }
    }

    fn json(&self) -> Json {
        let side = |side: &Checkpoint| json!({"path": json_path(&side.path), "format": side.format});
        let tensors: Map<String, Json> =
            self.found.tensors.iter().map(|(name, outcome)| (name.clone(), outcome_json(outcome))).collect();
        json!({
            "equal": self.is_equal(),
            "first": side(&self.sides[0]),
            "second": side(&self.sides[1]),
            "tensors": tensors,
            "values": self.found.values,
            "run_state": self.states(),
            "under": self.under.map(under_json),
        })
    }
}

fn under_json(under: &Under) -> Json {
    let side = ["first", "second"][under.side];
    json!({"side": side, "key": under.key})
}

/// The name of an outcome in JSON.
fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::EqualBits => "equal_bits",
        Outcome::EqualValues { .. } => "equal_values",
        Outcome::WithinTolerance(_) => "within_tolerance",
        Outcome::Differs(_) => "differs",
        Outcome::BitsDiffer { .. } => "bits_differ",
        Outcome::TypesDiffer { .. } => "types_differ",
        Outcome::ShapesDiffer { .. } => "shapes_differ",
        Outcome::OnlyInFirst => "only_in_first",
        Outcome::OnlyInSecond => "only_in_second",
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
            let Deviation { dtypes, count, largest, at, .. } = deviation;
            [types(dtypes), count.to_string(), format!("{largest:.3e}"), at.to_string()]
        }
        Outcome::BitsDiffer { count, first } => [none(), count.to_string(), none(), first.to_string()],
        Outcome::ShapesDiffer { shapes: [a, b] } => [format!("{a:?}, {b:?}"), none(), none(), none()],
        Outcome::OnlyInFirst | Outcome::OnlyInSecond => [none(), none(), none(), none()],
    };
    let [types, differing, largest, at] = rest;
    Some([tensor.clone(), outcome_text(outcome), types, differing, largest, at])
}

/// The name of an outcome in text.
fn outcome_text(outcome: &Outcome) -> String {
    match outcome {
        Outcome::OnlyInFirst => "only in A".to_owned(),
        Outcome::OnlyInSecond => "only in B".to_owned(),
        _ => outcome_name(outcome).replace('_', " "),
    }
}

fn outcome_json(outcome: &Outcome) -> Json {
    let mut json = json!({"outcome": outcome_name(outcome)});
    match outcome {
        Outcome::EqualBits | Outcome::OnlyInFirst | Outcome::OnlyInSecond => {}
        Outcome::EqualValues { dtypes } | Outcome::TypesDiffer { dtypes } => {
            json["dtypes"] = json!(dtypes.map(|dtype| dtype.name()));
        }
        Outcome::ShapesDiffer { shapes } => json["shapes"] = json!(shapes),
        Outcome::BitsDiffer { count, first } => {
            json["differing"] = json!(count);
            json["at"] = json!(first);
        }
        Outcome::WithinTolerance(deviation) | Outcome::Differs(deviation) => {
            let Deviation { dtypes, count, beyond, largest, at, values } = deviation;
            json["dtypes"] = json!(dtypes.map(|dtype| dtype.name()));
            json["differing"] = json!(count);
            json["beyond_tolerance"] = json!(beyond);
            json["largest"] = number(*largest);
            json["at"] = json!(at);
            json["values"] = json!(values.map(number));
        }
    }
    json
}

/// A number, or text for values that JSON numbers cannot represent.
fn number(value: f64) -> Json {
    if value.is_finite() { json!(value) } else { json!(format!("{value:?}")) }
}
