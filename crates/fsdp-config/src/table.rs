//! Declares a table of the run file as a struct: each key appears once, with its type, kind and default.
//!
//! This does not use `serde`'s derive: its errors name neither the dotted key nor the accepted values, and do not know
//! whether the file or a `--set` wrote the value.

/// Declares the struct of a table, and how it is read, written and described.
///
/// After `=` comes the method of [`Reader`](super::reader::Reader) that reads the key. The function of the same name in
/// [`writer`](super::writer) writes it, and the one in [`describe`](super::describe) describes it for editors, together
/// with the doc comment of the field. `as` gives the key if it differs from the name of the field; `also` lists keys
/// that are read together with others.
macro_rules! table {
    ($(#[doc = $about:literal])* pub struct $table:ident $(also [$($also:literal),*])? {
        $($(#[doc = $doc:literal])* $field:ident $(as $key:literal)?: $type:ty = $method:ident($($argument:expr),*),)*
    }) => {
        $(#[doc = $about])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $table { $($(#[doc = $doc])* pub $field: $type,)* }

        impl $table {
            /// Reads the table: unknown keys first, then key by key.
            ///
            /// # Errors
            /// The first error found.
            pub(super) fn read(reader: &Reader<'_>) -> Result<$table, ConfigError> {
                reader.expect_known(&[$(table!(@ $field $($key)?),)* $($($also),*)?])?;
                Ok($table { $($field: reader.$method(table!(@ $field $($key)?), $($argument),*)?,)* })
            }
        }

        impl $crate::describe::TableSchema for $table {
            fn schema() -> serde_json::Value {
                use std::marker::PhantomData;
                use $crate::describe;
                describe::of_table(
                    concat!($($about),*),
                    vec![$((
                        table!(@ $field $($key)?),
                        concat!($($doc),*),
                        describe::$method(PhantomData::<$type>, $($argument),*),
                    )),*],
                    &[$($($also),*)?],
                )
            }
        }

        impl serde::Serialize for $table {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let keys = [$(table!(@ $field $($key)?)),*].len();
                let mut fields = serializer.serialize_struct(stringify!($table), keys)?;
                $(writer::$method(&mut fields, table!(@ $field $($key)?), &self.$field)?;)*
                serde::ser::SerializeStruct::end(fields)
            }
        }
    };
    (@ $field:ident) => { stringify!($field) };
    (@ $field:ident $key:literal) => { $key };
}

pub(super) use table;
