//! Says what a process waits for that was started as one of several.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use fsdp_comm::process::place::ProcessPlace;

use super::variable;
use crate::output;

/// Processes of one launcher start seconds apart on a busy node.
const PATIENCE: Duration = Duration::from_secs(5);

/// Joins the others; if that takes long, says once that it waits. A shell or program below a launcher leaves its variables to
/// commands that it starts alone.
pub(super) fn said<T>(place: ProcessPlace, join: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (joined, until) = mpsc::channel::<()>();
        let say = move || {
            if until.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                output::note_of_any(&text(place, &variable));
            }
        };
        // Where threads run out, joining needs them more.
        drop(thread::Builder::new().spawn_scoped(scope, say));
        let outcome = join();
        drop(joined);
        outcome
    })
}

fn text(place: ProcessPlace, variable: &dyn Fn(&str) -> Option<String>) -> String {
    let ProcessPlace { launched_by, process, processes, .. } = place;
    let names = launched_by.variables();
    let set: Vec<String> =
        names.iter().filter_map(|name| Some(format!("{name}={}", variable(name)?))).collect();
    format!(
        "waiting for the other processes: this is process {process} of {processes} of {launched_by} ({}); if it was meant to run \
         alone, unset these variables",
        set.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use fsdp_comm::process::place::recognize;

    use super::*;

    #[test]
    fn text_names_the_place_and_the_variables_that_are_set() {
        let set = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
        let variable =
            |name: &str| set.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned());
        let place = recognize(&variable).unwrap().unwrap();
        assert_eq!(
            text(place, &variable),
            "waiting for the other processes: this is process 1 of 2 of torchrun (RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, \
             LOCAL_WORLD_SIZE=2); if it was meant to run alone, unset these variables"
        );
    }
}
