//! Reads plain values as the types they should have: dict entries, sizes, counts.
//!
//! Python writers use types loosely in these formats: a shape may be a list, a tuple or a `torch.Size`. The functions
//! here accept all of them.

use crate::checkpoint::Value;

/// The value under a text key of a dict, or the attribute of an object.
pub(crate) fn field<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let items = match value {
        Value::Dict(items) => items,
        // For a class with slots, the second item holds the attributes.
        Value::Object { state: Some(state), .. } => match &**state {
            Value::Tuple(two) if two.len() == 2 => return field(&two[1], name),
            state => return field(state, name),
        },
        _ => return None,
    };
    items.iter().find(|(key, _)| text(key) == Some(name)).map(|(_, value)| value)
}

/// The pairs of a dict; `None` if a key is not text.
pub(crate) fn entries(value: &Value) -> Option<Vec<(&str, &Value)>> {
    let Value::Dict(items) = value else { return None };
    items.iter().map(|(key, value)| Some((text(key)?, value))).collect()
}

/// The text of a string; `None` for any other value.
pub(crate) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::Str(text) => Some(text),
        _ => None,
    }
}

/// A count or an index; `None` if the value is not an integer or is negative.
pub(crate) fn count(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// The items of a list, a tuple or a `torch.Size`; `None` for any other value.
pub(crate) fn items(value: &Value) -> Option<&[Value]> {
    match value {
        Value::List(items) | Value::Tuple(items) => Some(items),
        Value::Object { class, args, .. } if class.module == "torch" && class.name == "Size" => {
            match &args[..] {
                [sizes] => items(sizes),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The sizes of a list, a tuple or a `torch.Size`; `None` if one of them is not a count.
pub(crate) fn sizes(value: &Value) -> Option<Vec<u64>> {
    items(value)?.iter().map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Global;

    #[test]
    fn sizes_accept_lists_tuples_and_torch_size() {
        let numbers = || vec![Value::Int(2), Value::Int(3)];
        let class = |name: &str| Global { module: "torch".into(), name: name.into() };
        let of = |name, args| Value::Object { class: class(name), args, state: None };
        assert_eq!(sizes(&Value::List(numbers())), Some(vec![2, 3]));
        assert_eq!(sizes(&Value::Tuple(numbers())), Some(vec![2, 3]));
        assert_eq!(sizes(&of("Size", vec![Value::Tuple(numbers())])), Some(vec![2, 3]));
        assert_eq!(sizes(&of("Size", numbers())), None);
        assert_eq!(sizes(&of("device", vec![Value::Tuple(numbers())])), None);
        assert_eq!(sizes(&Value::List(vec![Value::Int(-1)])), None);
        assert_eq!(sizes(&Value::Int(1)), None);
    }

    #[test]
    fn fields_are_read_from_dicts_and_object_states() {
        let dict = Value::Dict(vec![(Value::Int(1), Value::None), (Value::Str("a".into()), Value::Int(5))]);
        let class = Global { module: "m".into(), name: "C".into() };
        let object = Value::Object { class, args: vec![], state: Some(Box::new(dict.clone())) };
        assert_eq!(field(&dict, "a").and_then(count), Some(5));
        assert_eq!(field(&object, "a").and_then(count), Some(5));
        assert_eq!(field(&dict, "b"), None);
        assert_eq!(entries(&dict), None);
    }
}
