//! Writes a predicted step as a trace, like the trace of a real step.

use std::path::Path;

use super::ahead::RunForecast;
use crate::error::CliError;
use crate::trace::TraceFile;

/// Writes the step of the first rank.
///
/// # Errors
/// [`CliError`]: the file cannot be written, or has contents other than a trace.
pub(super) fn write(run: &RunForecast<'_>, file: &Path) -> Result<(), CliError> {
    crate::trace::check(file, &run.config)?;
    let trace = TraceFile::create(file)?;
    for (op, span) in run.plan.step.ops.iter().zip(&run.forecast.timeline.spans) {
        if span.end > span.start {
            trace.write(
                op.kind.queue(),
                super::report::name(&run.plan, op),
                op.kind.name(),
                span.start,
                span.end,
            );
        }
    }
    trace.finish()
}
