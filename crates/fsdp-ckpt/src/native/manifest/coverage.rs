//! The proof that every row of every tensor is in exactly one file.

use std::collections::BTreeMap;

use super::Manifest;
use crate::error::NativeFault;

pub(super) fn check(manifest: &Manifest) -> Result<(), NativeFault> {
    let mut held: BTreeMap<&str, Vec<(usize, usize, &str)>> = BTreeMap::new();
    for file in &manifest.files {
        for shard in &file.shards {
            let place = (shard.rows.start, shard.rows.end, file.name.as_str());
            held.entry(&shard.tensor).or_default().push(place);
        }
    }
    for (name, tensor) in &manifest.tensors {
        let mut places = held.remove(name.as_str()).unwrap_or_default();
        places.sort_unstable();
        let (mut covered, mut last_file) = (0, "");
        for (start, end, file) in places.into_iter().filter(|(start, end, _)| start != end) {
            if start > covered {
                return Err(NativeFault::RowsUncovered { tensor: name.clone(), rows: covered..start });
            }
            if start < covered {
                let (first, second) = (last_file.to_owned(), file.to_owned());
                let rows = start..end.min(covered);
                return Err(NativeFault::RowsDoubled { tensor: name.clone(), rows, first, second });
            }
            (covered, last_file) = (end, file);
        }
        if covered < tensor.row_count() {
            let rows = covered..tensor.row_count();
            return Err(NativeFault::RowsUncovered { tensor: name.clone(), rows });
        }
    }
    Ok(())
}
