//! A table of the run file as a struct: each key is stated once, with its type, its kind and its default.
//!
//! This is not derived from `serde`, whose errors name neither the dotted key nor what is allowed, and do not know
//! whether the file or a `--set` wrote the value.

/// Declares the struct of a table, with how it is read and written.
///
/// Behind `=` stands the method of [`Reader`](super::reader::Reader) that reads the key; the function of that name in
/// [`written`](super::written) writes it. `as` gives the key, where it is not the name of the field; `also` names keys that
/// are read together with others.
macro_rules! table {
    ($(#[$attribute:meta])* pub struct $table:ident $(also [$($also:literal),*])? {
        $($(#[$doc:meta])* $field:ident $(as $key:literal)?: $type:ty = $method:ident($($argument:expr),*),)*
    }) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $table { $($(#[$doc])* pub $field: $type,)* }

        impl $table {
            /// Reads the table: unknown keys first, then key by key.
            ///
            /// # Errors
            /// The first thing that is wrong with it.
            pub(super) fn read(reader: &Reader<'_>) -> Result<$table, ConfigError> {
                reader.expect_known(&[$(table!(@ $field $($key)?),)* $($($also),*)?])?;
                Ok($table { $($field: reader.$method(table!(@ $field $($key)?), $($argument),*)?,)* })
            }
        }

        impl serde::Serialize for $table {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let keys = [$(table!(@ $field $($key)?)),*].len();
                let mut fields = serializer.serialize_struct(stringify!($table), keys)?;
                $(written::$method(&mut fields, table!(@ $field $($key)?), &self.$field)?;)*
                serde::ser::SerializeStruct::end(fields)
            }
        }
    };
    (@ $field:ident) => { stringify!($field) };
    (@ $field:ident $key:literal) => { $key };
}

pub(super) use table;
