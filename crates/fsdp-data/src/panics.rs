//! Turns panics of libraries that parse untrusted files into errors for the caller, without output on stderr.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, UnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread will be caught and reported by the code that catches it.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs a closure, and returns the message of a panic as an error.
pub(super) fn catch_panic<T>(run: impl FnOnce() -> T + UnwindSafe) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default_hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_CAUGHT.get() {
                default_hook(info);
            }
        }));
    });
    let previous = IS_CAUGHT.replace(true);
    let result = catch_unwind(run);
    IS_CAUGHT.set(previous);
    result.map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
