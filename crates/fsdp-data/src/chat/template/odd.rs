//! Values that templates may pass over, but not use: those that have no JSON form, such as timestamps in Parquet.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{DynObject, Object, ObjectRepr};
use minijinja::{Error, ErrorKind, State, Value};

thread_local! {
    /// What is known of the value that the template of this thread used first, if it used one.
    static USED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A value of which only this is known.
#[derive(Debug)]
pub(super) struct Odd(pub(super) String);

impl Odd {
    fn record_use(&self) {
        USED.with_borrow_mut(|used| {
            used.get_or_insert_with(|| self.0.clone());
        });
    }
}

/// Records the use of a value, if it is one of these.
pub(super) fn record_use(value: &Value) {
    if let Some(odd) = value.downcast_object_ref::<Odd>() {
        odd.record_use();
    }
}

/// Returns what is known of the first such value that was used since the last call.
pub(super) fn take_used() -> Option<String> {
    USED.take()
}

impl Object for Odd {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, _key: &Value) -> Option<Value> {
        self.record_use();
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.record_use();
        true
    }

    fn call_method(
        self: &Arc<Self>,
        _state: &State<'_, '_>,
        _method: &str,
        _args: &[Value],
    ) -> Result<Value, Error> {
        self.record_use();
        Err(Error::from(ErrorKind::UnknownMethod))
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        self.record_use();
        other.downcast_ref::<Odd>().map(|_| Ordering::Equal)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.record_use();
        f.write_str(&self.0)
    }
}
