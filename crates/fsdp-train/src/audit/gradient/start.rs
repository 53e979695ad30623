//! Whether the step began with other weights than the state before it has.

use fsdp_nn::model::Architecture;

use super::{Judge, wider};
use crate::audit::report::{Cause, EXPLAINED_MIN, Finding, shown};
use crate::audit::state::blocks;
use crate::audit::trial::Trial;
use crate::audit::update::{self, Expected};
use crate::error::TrainError;

/// Relative distance from which weights count as others.
const MOVED_MIN: f64 = 1e-3;

impl<A: Architecture + Clone> Judge<'_, A> {
    /// Tries whether the step began with other weights than the state before it has: those from which the update of the run
    /// file leads to the state after it.
    ///
    /// # Errors
    /// Errors of the model and of reading.
    pub(in crate::audit) fn by_start(
        &mut self,
        whole: f64,
        expected: &Expected<'_>,
    ) -> Result<Option<Finding>, TrainError> {
        let spec = self.spec;
        let trial = Trial { is_after: true, ..self.sound.clone() };
        let Some(undo) = update::undo(expected) else { return Ok(None) };
        self.around.after.undo = Some(undo);
        let found = self.measure(&trial, wider(self.param_dtype), &[])?.sums;
        let mut moved = Vec::new();
        for id in expected.settings.keys().copied() {
            let (mut distance2, mut length2) = (0.0, 0.0);
            for rows in blocks(spec, id) {
                let [before, start] =
                    [self.around.before.param(id, rows.clone())?, self.around.after.param(id, rows)?];
                let squares = before.iter().zip(&start).map(|(before, start)| (before - start).powi(2));
                distance2 += squares.sum::<f64>();
                length2 += before.iter().map(|value| value * value).sum::<f64>();
            }
            if distance2 > MOVED_MIN * MOVED_MIN * length2 {
                moved.push(id.0);
            }
        }
        self.around.after.undo = None;
        let compared = self.compared(&found, &[]);
        let explains = 1.0 - compared.distance2(compared.clip()) / whole;
        Ok((explains >= EXPLAINED_MIN).then(|| {
            let names = compared.names(&moved);
            let text = format!(
                "the step did not begin with the weights of the state before it: {} had other values, as if they were not loaded",
                shown(&names)
            );
            Finding { cause: Cause::ModelDiffers, params: names, factor: None, explains, text }
        }))
    }
}
