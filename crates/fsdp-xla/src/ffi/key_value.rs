//! The callbacks through which a plugin uses the [store](Store) of the processes of a run.
//!
//! A plugin passes them a struct, like those that we pass to it, with a user argument set when its client was created:
//! here the store. Values that they allocate are freed by the plugin through a deleter; an error is made by the plugin
//! from a code and a text. They may be called from any thread, and catch all panics.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::api::{Arguments, Word};
use crate::store::{Store, StoreError};

/// Longer than any plugin waits that sets a limit.
const WITHOUT_LIMIT: Duration = Duration::from_secs(7 * 24 * 3600);

/// `INTERNAL` of `PJRT_Error_Code`.
const INTERNAL: i32 = 13;

type Callback = unsafe extern "C" fn(*mut Word) -> Word;

/// `PJRT_CallbackError`: makes an error from a code and a text.
type MakeError = unsafe extern "C" fn(i32, *const u8, usize) -> Word;

/// Values that plugins hold and have not freed yet, by the address of their bytes.
static LENT: Mutex<BTreeMap<Word, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// Adds the callbacks on a store to the struct of `PJRT_Client_Create`. The store must stay at its address while the
/// client lives.
pub(super) fn with_store(arguments: Arguments, store: &Store) -> Arguments {
    let callback = |arguments: Arguments, field, callback: Callback| {
        arguments.set(field, callback as Word).pointer(field + 1, store)
    };
    callback(callback(callback(arguments, 4, get), 6, put), 9, try_get)
}

/// `PJRT_KeyValueGetCallback`.
unsafe extern "C" fn get(words: *mut Word) -> Word {
    // SAFETY: the plugin passes a `PJRT_KeyValueGetCallback_Args`: two words, key and length, an `int`, the function
    // that makes errors, the store, and three outputs: the value, its length and its deleter.
    unsafe {
        let limit = *words.add(4).cast::<i32>();
        let limit = u64::try_from(limit).map_or(WITHOUT_LIMIT, Duration::from_millis);
        answer(words, 5, |store, key| store.get(key, limit))
    }
}

/// `PJRT_KeyValueTryGetCallback`.
unsafe extern "C" fn try_get(words: *mut Word) -> Word {
    // SAFETY: the plugin passes a `PJRT_KeyValueTryGetCallback_Args`, which is as in `get`, without the `int`.
    unsafe { answer(words, 4, Store::try_get) }
}

/// `PJRT_KeyValuePutCallback`.
unsafe extern "C" fn put(words: *mut Word) -> Word {
    // SAFETY: the plugin passes a `PJRT_KeyValuePutCallback_Args`: two words, key and length, value and length, the
    // function that makes errors, and the store.
    unsafe {
        let value = bytes(*words.add(4), *words.add(5)).to_vec();
        match guarded(words, 6, |store, key| store.put(key, value)) {
            Ok(()) => 0,
            Err(failure) => error(*words.add(6), &failure),
        }
    }
}

/// Looks up a value and lends it to the plugin.
///
/// # Safety
/// Fields 2 and 3 must be key and length. From `field` on there must be the function that makes errors, the store, and
/// three output words.
unsafe fn answer(
    words: *mut Word,
    field: usize,
    lookup: impl FnOnce(&Store, &[u8]) -> Result<Vec<u8>, StoreError>,
) -> Word {
    // SAFETY: as the caller promises.
    unsafe {
        match guarded(words, field, lookup) {
            Ok(value) => {
                let len = value.len();
                *words.add(field + 2) = lend(value);
                *words.add(field + 3) = len;
                *words.add(field + 4) = free_value as extern "C" fn(Word) as Word;
                0
            }
            Err(failure) => error(*words.add(field), &failure),
        }
    }
}

/// Calls the store with the key; a panic becomes an error.
///
/// # Safety
/// Fields 2 and 3 must be key and length, and the field after `field` the store.
unsafe fn guarded<T>(
    words: *mut Word,
    field: usize,
    call: impl FnOnce(&Store, &[u8]) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    // SAFETY: as the caller promises; the client created with the store still lives, so the store has not moved.
    let (key, store) =
        unsafe { (bytes(*words.add(2), *words.add(3)), &*(*words.add(field + 1) as *const Store)) };
    let outcome = catch_unwind(AssertUnwindSafe(|| call(store, key)));
    let panicked =
        |_| StoreError { code: INTERNAL, message: "the control plane of fsdp has panicked".to_owned() };
    outcome.map_err(panicked).flatten()
}

/// Makes an error of the plugin's own type.
///
/// # Safety
/// `make` must point to a `PJRT_CallbackError`.
unsafe fn error(make: Word, StoreError { code, message }: &StoreError) -> Word {
    // SAFETY: as the caller promises; the text is copied before this returns.
    unsafe { (*(make as *const MakeError))(*code, message.as_ptr(), message.len()) }
}

/// # Safety
/// `pointer` must point to `len` bytes, unless `len` is 0.
unsafe fn bytes<'a>(pointer: Word, len: Word) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(pointer as *const u8, len) }
}

/// Keeps a value until it is freed; returns the address of its bytes.
fn lend(mut value: Vec<u8>) -> Word {
    // Empty vectors have no unique address.
    value.push(0);
    let address = value.as_mut_ptr() as Word;
    LENT.lock().unwrap_or_else(PoisonError::into_inner).insert(address, value);
    address
}

/// `PJRT_KeyValueGetCallback_ValueDeleter`.
extern "C" fn free_value(value: Word) {
    LENT.lock().unwrap_or_else(PoisonError::into_inner).remove(&value);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fsdp_comm::assembly::{Assembly, InMemoryAssembly};

    use super::*;
    use crate::store::{DEADLINE_EXCEEDED, NOT_FOUND};

    /// Makes errors as a plugin does; here an error is its code, and 0 is not an error.
    extern "C" fn code(code: i32, _message: *const u8, len: usize) -> Word {
        assert!(len > 0, "errors have words");
        code as Word
    }

    /// Calls `callback` with a key, followed by the words in `rest`.
    fn call(callback: Word, key: &str, rest: &[Word]) -> (Word, [Word; 10]) {
        let mut words = [0; 10];
        words[2..4].copy_from_slice(&[key.as_ptr() as Word, key.len()]);
        words[4..4 + rest.len()].copy_from_slice(rest);
        // SAFETY: `callback` is one of the callbacks, and the words are those it requires.
        let error = unsafe { std::mem::transmute::<Word, Callback>(callback)(words.as_mut_ptr()) };
        (error, words)
    }

    #[test]
    fn plugin_callbacks_put_get_and_free_values() {
        let assembly: Arc<dyn Assembly> = Arc::new(InMemoryAssembly::new(1));
        let store = Store::new(&assembly);
        let arguments = with_store(Arguments::new(), &store);
        let [get, put, try_get] = [4, 6, 9].map(|field| arguments.get(field));
        let user = &raw const store as Word;
        assert_eq!([5, 7, 10].map(|field| arguments.get(field)), [user; 3]);
        let make: MakeError = code;
        let make = &raw const make as Word;
        assert_eq!(call(try_get, "key", &[make, user]).0, NOT_FOUND as Word);
        assert_eq!(call(get, "key", &[5, make, user]).0, DEADLINE_EXCEEDED as Word);
        for (key, value) in [("key", "value"), ("nothing", "")] {
            assert_eq!(call(put, key, &[value.as_ptr() as Word, value.len(), make, user]).0, 0);
            // A negative limit means no limit.
            let limit = -1_i32 as u32 as Word;
            for (field, (error, words)) in
                [(7, call(get, key, &[limit, make, user])), (6, call(try_get, key, &[make, user]))]
            {
                assert_eq!(error, 0);
                // SAFETY: the callback has set the value's address and length.
                assert_eq!(unsafe { bytes(words[field], words[field + 1]) }, value.as_bytes());
                let is_lent = || LENT.lock().unwrap().contains_key(&words[field]);
                assert!(is_lent());
                // SAFETY: the callback has set the value's deleter.
                unsafe { std::mem::transmute::<Word, extern "C" fn(Word)>(words[field + 2])(words[field]) };
                assert!(!is_lent());
            }
        }
    }
}
