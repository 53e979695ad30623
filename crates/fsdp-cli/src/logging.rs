//! Output of `tracing` spans and events: text or JSON on stderr according to `RUST_LOG`, and the trace file.

use std::ffi::OsString;
use std::io::{self, IsTerminal};

use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{Targets, filter_fn};
use tracing_subscriber::fmt;
use tracing_subscriber::fmt::format::{FmtSpan, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, registry};

use crate::error::CliError;
use crate::output;
use crate::trace::{TARGET, TraceFile};

/// The value of `RUST_LOG`, unless unset or empty.
fn requested_filter() -> Option<OsString> {
    std::env::var_os("RUST_LOG").filter(|filter| !filter.is_empty())
}

/// Whether `RUST_LOG` is set.
pub(crate) fn is_requested() -> bool {
    requested_filter().is_some()
}

/// The filter for events: `RUST_LOG`; without it, in JSON format, the events that replace messages to the user.
///
/// # Errors
/// [`CliError::LogFilter`].
fn filter() -> Result<Option<Targets>, CliError> {
    let Some(requested) = requested_filter() else {
        let level = if output::is_quiet() { LevelFilter::WARN } else { LevelFilter::INFO };
        return Ok(output::is_json().then(|| Targets::new().with_target("fsdp", level)));
    };
    requested.to_string_lossy().parse().map(Some).map_err(|source| CliError::LogFilter { source })
}

/// Installs the subscriber of this process. A second call has no effect.
///
/// # Errors
/// [`CliError::LogFilter`].
pub(crate) fn install(trace: Option<&TraceFile>) -> Result<(), CliError> {
    let events = filter()?.map(|filter| events().with_filter(filter));
    let trace = trace.map(|file| file.layer().with_filter(filter_fn(|span| span.target() == TARGET)));
    if events.is_some() || trace.is_some() {
        // Fails only if a subscriber is already installed; then that one is kept.
        let _ = registry().with(events).with(trace).try_init();
    }
    Ok(())
}

/// The layer that writes events on stderr.
fn events() -> Box<dyn Layer<Registry> + Send + Sync> {
    let layer = fmt::layer::<Registry>().with_writer(io::stderr).with_span_events(FmtSpan::CLOSE);
    if output::is_json() {
        return layer.json().map_event_format(|format| WithProcessName { format, is_json: true }).boxed();
    }
    layer
        .with_ansi(io::stderr().is_terminal())
        .map_event_format(|format| WithProcessName { format, is_json: false })
        .boxed()
}

/// Formats events with the name of this process, if it is not the first of several.
struct WithProcessName<F> {
    format: F,
    is_json: bool,
}

impl<S, N, F> FormatEvent<S, N> for WithProcessName<F>
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
        if self.is_json {
            let mut object = String::new();
            self.format.format_event(context, Writer::new(&mut object), event)?;
            return writer.write_str(&output::with_process_name(&object));
        }
        if let Some(name) = output::process_name() {
            write!(writer, "{name}: ")?;
        }
        self.format.format_event(context, writer, event)
    }
}
