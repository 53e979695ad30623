//! A JSON object read as a list of pairs, in which no key may be repeated.
//!
//! JSON readers may keep either of two equal keys, so a file with a repeated key could mean two things; it is refused.

use std::{collections::BTreeSet, fmt, marker::PhantomData};

use serde::{
    Serialize, Serializer,
    de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor},
};

/// The pairs of a JSON object in the order of the text.
pub(crate) struct UniqueMap<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

impl<V: Serialize> Serialize for UniqueMap<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<V>, A::Error> {
        let mut keys = BTreeSet::new();
        let mut pairs = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            if !keys.insert(key.clone()) {
                return Err(A::Error::custom(format_args!("the key `{key}` is given twice")));
            }
            pairs.push((key, map.next_value()?));
        }
        Ok(UniqueMap(pairs))
    }
}
