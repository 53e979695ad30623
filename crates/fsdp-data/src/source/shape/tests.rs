use super::*;

fn message(name: &str) -> Shape {
    let fields = vec![("id".to_owned(), Shape::Json), (name.to_owned(), Shape::odd(name, "date"))];
    Shape::list(Shape::object(fields))
}

#[test]
fn shape_without_odd_part_is_json() {
    let plain = Shape::object(vec![("a".to_owned(), Shape::list(Shape::map(Shape::Json)))]);
    assert_eq!(plain, Shape::Json);
    assert_ne!(message("when"), Shape::Json);
}

#[test]
fn odd_column_is_at_fault_only_if_it_is_used() {
    for odd in [Shape::odd("a", "date"), Shape::list(Shape::odd("a", "date")), Shape::odd_map("a")] {
        assert!(odd.fault().is_some(), "{odd:?}");
    }
    for name in ["when", "value"] {
        assert_eq!(message(name).fault(), None);
    }
    for name in ["role", "content", "from", "weight", "train", "training", "train_detail"] {
        let fault = format!("column \"{name}\" is of type date");
        assert!(message(name).fault().is_some_and(|found| found.starts_with(&fault)), "{name}");
    }
    let value_beside = |names: &[&str]| {
        let mut fields: Vec<_> = names.iter().map(|name| ((*name).to_owned(), Shape::Json)).collect();
        fields.push(("value".to_owned(), Shape::odd("value", "date")));
        Shape::list(Shape::object(fields)).fault().is_some()
    };
    assert!(value_beside(&["from"]) && !value_beside(&["role"]) && !value_beside(&["from", "role"]));
}
