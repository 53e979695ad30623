//! What becomes of `tracing` spans and events: text on stderr as `RUST_LOG` says, and the trace file.

use std::ffi::OsString;
use std::io::{self, IsTerminal};

use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{Targets, filter_fn};
use tracing_subscriber::fmt;
use tracing_subscriber::fmt::format::{FmtSpan, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, registry};

use crate::error::CliError;
use crate::output;
use crate::trace::{TARGET, TraceFile};

/// What `RUST_LOG` says, if it says anything.
fn asked_for() -> Option<OsString> {
    std::env::var_os("RUST_LOG").filter(|filter| !filter.is_empty())
}

/// Whether `RUST_LOG` asks for anything.
pub(crate) fn is_asked_for() -> bool {
    asked_for().is_some()
}

/// Installs the subscriber of this process. A second call has no effect.
///
/// # Errors
/// [`CliError::LogFilter`].
pub(crate) fn install(trace: Option<&TraceFile>) -> Result<(), CliError> {
    let text = if let Some(filter) = asked_for() {
        let filter: Targets =
            filter.to_string_lossy().parse().map_err(|source| CliError::LogFilter { source })?;
        let ansi = io::stderr().is_terminal();
        let layer = fmt::layer().with_writer(io::stderr).with_ansi(ansi).with_span_events(FmtSpan::CLOSE);
        let layer = layer.event_format(Spoken(fmt::format()));
        Some(layer.with_filter(filter))
    } else {
        None
    };
    let trace = trace.map(|file| file.layer().with_filter(filter_fn(|span| span.target() == TARGET)));
    if text.is_some() || trace.is_some() {
        // Only a subscriber that is there already can make this fail, and then that one is wanted.
        let _ = registry().with(text).with(trace).try_init();
    }
    Ok(())
}

/// Lines that begin with who speaks, where that is another process than the first of several.
struct Spoken<F>(F);

impl<S, N, F> FormatEvent<S, N> for Spoken<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        if let Some(speaker) = output::speaker() {
            write!(writer, "{speaker}: ")?;
        }
        self.0.format_event(context, writer, event)
    }
}
