//! The columns of a file of runs.

use crate::error::RowError;

/// The required columns.
pub(crate) const NEEDED: [&str; 11] = [
    "layers",
    "hidden",
    "heads",
    "ffn",
    "vocab",
    "seq",
    "micro_batch",
    "devices",
    "device_type",
    "sharding",
    "act_ckpt",
];

/// The optional columns.
const OPTIONAL: [&str; 14] = [
    "source",
    "model",
    "params",
    "kv_heads",
    "global_batch_tokens",
    "precision",
    "compile",
    "step_time_ms",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "peak_mem_gib",
    "row",
    "group",
];

/// The columns of a file.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    /// Their names in lower case, in the order of the file.
    pub(crate) names: Vec<String>,
    /// The columns that are not known.
    pub(crate) unknown: Vec<String>,
}

impl Columns {
    /// Reads the columns of a header.
    ///
    /// # Errors
    /// [`RowError`]: a column is missing, occurs twice, or has almost the name of a missing column.
    pub(crate) fn of(header: &csv::StringRecord, origin: &str) -> Result<Self, RowError> {
        let origin = || origin.to_owned();
        let names: Vec<String> = header.iter().map(|name| name.trim().to_lowercase()).collect();
        let has = |column: &str| names.iter().any(|name| name == column);
        let mut unknown = Vec::new();
        for (index, name) in names.iter().enumerate() {
            if let Some(first) = names[..index].iter().position(|earlier| earlier == name) {
                let (first, second) = (first + 1, index + 1);
                return Err(RowError::Twice { origin: origin(), column: name.clone(), first, second });
            }
            let mut known = NEEDED.into_iter().chain(OPTIONAL);
            if known.clone().any(|known| known == name) {
                continue;
            }
            if let Some(meant) = known.find(|known| !has(known) && is_almost(name, known)) {
                return Err(RowError::Misspelt { origin: origin(), column: name.clone(), meant });
            }
            unknown.push(name.clone());
        }
        match NEEDED.into_iter().find(|column| !has(column)) {
            Some(column) => Err(RowError::Column { origin: origin(), column }),
            None => Ok(Self { names, unknown }),
        }
    }
}

/// Whether a name is another one with up to a third of its letters changed.
fn is_almost(name: &str, known: &str) -> bool {
    strsim::damerau_levenshtein(name, known) <= (known.len() / 3).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(header: &str) -> Result<Columns, String> {
        let header: Vec<&str> = header.split(',').collect();
        Columns::of(&csv::StringRecord::from(header), "runs.csv").map_err(|error| error.to_string())
    }

    #[test]
    fn all_columns_of_published_runs_are_known() {
        let header = include_str!("../data/published.csv").lines().next().unwrap();
        let columns = of(header).unwrap();
        assert_eq!((columns.names.len(), columns.unknown.len()), (NEEDED.len() + OPTIONAL.len(), 0));
    }

    #[test]
    fn misspelled_column_is_rejected_with_suggestion() {
        let needed = NEEDED.join(",");
        for (misspelt, meant) in [
            ("step_time_s", "step_time_ms"),
            ("steptime_ms", "step_time_ms"),
            ("peak_mem_gb", "peak_mem_gib"),
            ("prams", "params"),
        ] {
            let error = of(&format!("{needed},{misspelt}")).unwrap_err();
            assert!(error.contains(&format!("`{misspelt}`; did you mean `{meant}`?")), "{error}");
        }
        let error = of(&needed.replace("layers", "layerz")).unwrap_err();
        assert!(error.contains("`layerz`; did you mean `layers`?"), "{error}");
    }

    #[test]
    fn unknown_column_is_reported_but_accepted() {
        let columns =
            of(&format!("{},notes, Step_Time_MS ,cluster owner,step_time", NEEDED.join(","))).unwrap();
        // The last one resembles a column that exists.
        assert_eq!(columns.unknown, ["notes", "cluster owner", "step_time"]);
    }

    #[test]
    fn duplicate_column_is_rejected() {
        let error = of(&format!("{},Seq", NEEDED.join(","))).unwrap_err();
        assert_eq!(error, "runs.csv: column `seq` occurs twice, as number 6 and 12; keep one of them");
    }
}
