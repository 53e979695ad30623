//! Conversations with nested fields are the same in tables and in JSON lines.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use ::parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int32Type, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use arrow_array::{
    Array, ArrayRef, Date32Array, Float64Array, Int64Array, ListArray, RecordBatch, StringArray, StructArray,
    TimestampNanosecondArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{DataType, Field, Fields, Schema, TimeUnit};
use fsdp_config::{DataConfig, LossOn};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{assert_refused, config, load, seen};

/// The type of a column or of a part of it.
#[derive(Clone, Debug)]
enum Kind {
    Text,
    Number,
    Real,
    /// Days, which JSON does not have.
    Date,
    /// Nanoseconds, which JSON does not have.
    Moment,
    List(Box<Kind>),
    Object(Vec<(String, Kind)>),
}

impl Kind {
    /// Whether no value has a JSON form.
    fn is_odd(&self) -> bool {
        match self {
            Kind::Date | Kind::Moment => true,
            Kind::List(items) => items.is_odd(),
            Kind::Text | Kind::Number | Kind::Real | Kind::Object(_) => false,
        }
    }
}

/// Makes kinds of these parts. Names of odd fields start with a z.
fn kinds(parts: impl Strategy<Value = Kind> + 'static) -> impl Strategy<Value = Kind> {
    parts.prop_recursive(3, 12, 4, |inner| {
        let fields = vec(inner.clone(), 1..4).prop_map(|kinds| {
            let name =
                |(kind, name): (&Kind, char)| format!("{}{name}", if kind.is_odd() { "z" } else { "" });
            let names: Vec<String> = kinds.iter().zip('a'..).map(name).collect();
            Kind::Object(names.into_iter().zip(kinds).collect())
        });
        prop_oneof![inner.prop_map(|kind| Kind::List(Box::new(kind))), fields]
    })
}

fn plain() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Text), Just(Kind::Number), Just(Kind::Real)]
}

/// Makes a value of a kind, whose fields may be absent.
fn value(kind: &Kind) -> BoxedStrategy<Value> {
    match kind {
        Kind::Text => "[a-c]{0,2}".prop_map(Value::from).boxed(),
        Kind::Number | Kind::Date | Kind::Moment => (0..99i64).prop_map(Value::from).boxed(),
        Kind::Real => (0..99u8).prop_map(|eighths| Value::from(f64::from(eighths) / 8.0)).boxed(),
        Kind::List(item) => vec(value(item), 0..3).prop_map(Value::from).boxed(),
        Kind::Object(fields) => {
            let fields: Vec<_> = fields
                .iter()
                .map(|(name, kind)| (Just(name.clone()), proptest::option::of(value(kind))))
                .collect();
            let present = |fields: Vec<(String, Option<Value>)>| {
                fields.into_iter().filter_map(|(name, value)| Some((name, value?))).collect::<Map<_, _>>()
            };
            fields.prop_map(move |fields| Value::Object(present(fields))).boxed()
        }
    }
}

/// Makes conversations whose second message has a field of a random kind, which is also in `tools`.
fn conversations(kinds: impl Strategy<Value = Kind>) -> impl Strategy<Value = (Kind, Vec<Value>)> {
    let rows = |kind: Kind| {
        let extra = proptest::option::of(value(&kind));
        let row = (extra.clone(), extra).prop_map(|(extra, tool)| {
            let mut message = json!({"role": "assistant", "content": "x"});
            message.as_object_mut().unwrap().extend(extra.map(|extra| ("extra".to_owned(), extra)));
            let tools: Vec<Value> =
                tool.into_iter().map(|tool| json!({"name": "f", "parameters": tool})).collect();
            json!({"messages": [{"role": "user", "content": "y"}, message], "tools": tools})
        });
        (Just(kind), vec(row, 1..6))
    };
    kinds.prop_flat_map(rows)
}

/// The kinds of the columns of conversations.
fn columns(extra: &Kind) -> Vec<(String, Kind)> {
    let object = |fields: &[(&str, Kind)]| {
        Kind::Object(fields.iter().map(|(name, kind)| ((*name).to_owned(), kind.clone())).collect())
    };
    let message = object(&[("role", Kind::Text), ("content", Kind::Text), ("extra", extra.clone())]);
    let tool = object(&[("name", Kind::Text), ("parameters", extra.clone())]);
    [("messages", message), ("tools", tool)]
        .map(|(name, item)| (name.to_owned(), Kind::List(Box::new(item))))
        .to_vec()
}

/// The number that a value of [`Kind::Real`] stands for. What JSON does not have is text here.
fn real(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| value.as_str().unwrap().parse().unwrap())
}

fn arrow_type(kind: &Kind) -> DataType {
    match kind {
        Kind::Text => DataType::Utf8,
        Kind::Number => DataType::Int64,
        Kind::Real => DataType::Float64,
        Kind::Date => DataType::Date32,
        Kind::Moment => DataType::Timestamp(TimeUnit::Nanosecond, None),
        Kind::List(item) => DataType::List(Arc::new(Field::new("item", arrow_type(item), true))),
        Kind::Object(fields) => DataType::Struct(arrow_fields(fields)),
    }
}

fn arrow_fields(fields: &[(String, Kind)]) -> Fields {
    fields.iter().map(|(name, kind)| Field::new(name, arrow_type(kind), true)).collect()
}

fn arrow_array(kind: &Kind, values: &[Option<&Value>]) -> ArrayRef {
    let nulls = || Some(NullBuffer::from_iter(values.iter().map(Option::is_some)));
    let numbers = || values.iter().map(|value| value.and_then(Value::as_i64));
    match kind {
        Kind::Text => {
            Arc::new(values.iter().map(|value| value.and_then(Value::as_str)).collect::<StringArray>())
        }
        Kind::Number => Arc::new(numbers().collect::<Int64Array>()),
        Kind::Date => Arc::new(numbers().map(|days| days.map(|days| days as i32)).collect::<Date32Array>()),
        Kind::Moment => Arc::new(numbers().collect::<TimestampNanosecondArray>()),
        Kind::Real => Arc::new(values.iter().map(|value| value.map(real)).collect::<Float64Array>()),
        Kind::List(item) => {
            let lists: Vec<&[Value]> =
                values.iter().map(|value| value.map_or(&[][..], |list| list.as_array().unwrap())).collect();
            let offsets = OffsetBuffer::from_lengths(lists.iter().map(|list| list.len()));
            let items: Vec<Option<&Value>> = lists.into_iter().flatten().map(Some).collect();
            let field = Arc::new(Field::new("item", arrow_type(item), true));
            Arc::new(ListArray::new(field, offsets, arrow_array(item, &items), nulls()))
        }
        Kind::Object(fields) => {
            let column = |(name, kind): &(String, Kind)| {
                let values: Vec<Option<&Value>> =
                    values.iter().map(|value| value.and_then(|object| object.get(name))).collect();
                arrow_array(kind, &values)
            };
            let arrays = fields.iter().map(column).collect();
            Arc::new(StructArray::new(arrow_fields(fields), arrays, nulls()))
        }
    }
}

fn write_arrow(path: &Path, columns: &[(String, Kind)], rows: &[Value]) {
    let rows: Vec<Option<&Value>> = rows.iter().map(Some).collect();
    let table = arrow_array(&Kind::Object(columns.to_vec()), &rows);
    let table = table.as_any().downcast_ref::<StructArray>().unwrap();
    let schema = Arc::new(Schema::new(arrow_fields(columns)));
    let batch = RecordBatch::try_new(Arc::clone(&schema), table.columns().to_vec()).unwrap();
    let mut writer = StreamWriter::try_new(File::create(path).unwrap(), &schema).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
}

fn parquet_type(name: &str, kind: &Kind) -> String {
    match kind {
        Kind::Text => format!("optional binary {name} (UTF8);"),
        Kind::Number => format!("optional int64 {name};"),
        Kind::Real => format!("optional double {name};"),
        Kind::Date => format!("optional int32 {name} (DATE);"),
        Kind::Moment => format!("optional int64 {name} (TIMESTAMP(NANOS,true));"),
        Kind::List(item) => {
            format!(
                "optional group {name} (LIST) {{ repeated group list {{ {} }} }}",
                parquet_type("element", item)
            )
        }
        Kind::Object(fields) => {
            let fields: Vec<String> = fields.iter().map(|(name, kind)| parquet_type(name, kind)).collect();
            format!("optional group {name} {{ {} }}", fields.join(" "))
        }
    }
}

/// A column of Parquet: its values, and the levels that say which lists and objects each is in.
#[derive(Clone, Default)]
struct Leaf {
    values: Vec<Value>,
    definitions: Vec<i16>,
    repetitions: Vec<i16>,
}

fn leaf_count(kind: &Kind) -> usize {
    match kind {
        Kind::Text | Kind::Number | Kind::Real | Kind::Date | Kind::Moment => 1,
        Kind::List(item) => leaf_count(item),
        Kind::Object(fields) => fields.iter().map(|(_, kind)| leaf_count(kind)).sum(),
    }
}

/// Appends a value to the columns that its parts are in, at these levels of definition, repetition and nesting of lists.
fn append(leaves: &mut [Leaf], kind: &Kind, value: Option<&Value>, [defined, repeated, lists]: [i16; 3]) {
    let Some(value) = value else {
        for leaf in leaves {
            leaf.definitions.push(defined);
            leaf.repetitions.push(repeated);
        }
        return;
    };
    let defined = defined + 1;
    match kind {
        Kind::Text | Kind::Number | Kind::Real | Kind::Date | Kind::Moment => {
            leaves[0].values.push(value.clone());
            append(leaves, kind, None, [defined, repeated, lists]);
        }
        Kind::List(item) => match &**value.as_array().unwrap() {
            [] => append(leaves, item, None, [defined, repeated, lists]),
            items => {
                for (index, value) in items.iter().enumerate() {
                    let repeated = if index == 0 { repeated } else { lists + 1 };
                    append(leaves, item, Some(value), [defined + 1, repeated, lists + 1]);
                }
            }
        },
        Kind::Object(fields) => {
            let mut rest = leaves;
            for (name, kind) in fields {
                let (own, others) = rest.split_at_mut(leaf_count(kind));
                append(own, kind, value.get(name), [defined, repeated, lists]);
                rest = others;
            }
        }
    }
}

fn write_leaf(group: &mut SerializedRowGroupWriter<'_, File>, leaf: &Leaf) {
    let mut column = group.next_column().unwrap().unwrap();
    let levels = (Some(&*leaf.definitions), Some(&*leaf.repetitions));
    let numbers: Vec<i64> = leaf.values.iter().filter_map(Value::as_i64).collect();
    let texts: Vec<ByteArray> = leaf.values.iter().filter_map(Value::as_str).map(ByteArray::from).collect();
    match column.untyped() {
        ::parquet::column::writer::ColumnWriter::Int64ColumnWriter(_) => {
            column.typed::<Int64Type>().write_batch(&numbers, levels.0, levels.1).unwrap()
        }
        ::parquet::column::writer::ColumnWriter::Int32ColumnWriter(_) => {
            let days: Vec<i32> = numbers.iter().map(|&days| days as i32).collect();
            column.typed::<Int32Type>().write_batch(&days, levels.0, levels.1).unwrap()
        }
        ::parquet::column::writer::ColumnWriter::DoubleColumnWriter(_) => {
            let reals: Vec<f64> = leaf.values.iter().map(real).collect();
            column.typed::<DoubleType>().write_batch(&reals, levels.0, levels.1).unwrap()
        }
        _ => column.typed::<ByteArrayType>().write_batch(&texts, levels.0, levels.1).unwrap(),
    };
    column.close().unwrap();
}

fn write_parquet(path: &Path, columns: &[(String, Kind)], rows: &[Value]) {
    let fields: Vec<String> = columns.iter().map(|(name, kind)| parquet_type(name, kind)).collect();
    let schema = parse_message_type(&format!("message m {{ {} }}", fields.join(" "))).unwrap();
    let properties = WriterProperties::builder().build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for (name, kind) in columns {
        let mut leaves = vec![Leaf::default(); leaf_count(kind)];
        rows.iter().for_each(|row| append(&mut leaves, kind, row.get(name), [0; 3]));
        leaves.iter().for_each(|leaf| write_leaf(&mut group, leaf));
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Settings by which the model sees all that a record holds.
fn config_of_all(dir: &Path) -> DataConfig {
    config_with(&dir.join("all.jinja"), "{{ messages | tojson }}{{ tools | tojson }}")
}

fn config_with(file: &Path, template: &str) -> DataConfig {
    fs::write(file, template).unwrap();
    DataConfig {
        chat_template: Some(file.to_str().unwrap().to_owned()),
        loss_on: LossOn::All,
        seq_len: 4096,
        ..config()
    }
}

#[test]
fn numbers_that_json_lacks_are_refused_in_tables() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_of_all(dir.path());
    let [arrow, parquet] = ["a.arrow", "a.parquet"].map(|name| dir.path().join(name));
    let kind = Kind::List(Box::new(Kind::Object(vec![("score".to_owned(), Kind::Real)])));
    for odd in ["NaN", "inf", "-inf"] {
        let message = json!({"role": "user", "content": "y", "extra": [{"score": 1.5}, {"score": odd}]});
        let rows = [json!({"messages": [message], "tools": []})];
        write_arrow(&arrow, &columns(&kind), &rows);
        write_parquet(&parquet, &columns(&kind), &rows);
        for path in [&arrow, &parquet] {
            assert_refused(path, &config, &["row 0", "column \"messages\" contains NaN or Infinity"]);
        }
    }
}

/// Removes odd fields.
fn without_odd(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_odd),
        Value::Object(fields) => {
            fields.retain(|name, _| !name.starts_with('z'));
            fields.values_mut().for_each(without_odd);
        }
        _ => {}
    }
}

/// Whether there are odd values: numbers in odd fields.
fn has_odd(value: &Value, is_odd: bool) -> bool {
    match value {
        Value::Array(items) => items.iter().any(|item| has_odd(item, is_odd)),
        Value::Object(fields) => fields.iter().any(|(name, value)| has_odd(value, name.starts_with('z'))),
        _ => is_odd,
    }
}

/// Writes all fields but the odd ones.
const WITHOUT_ODD: &str = "\
{%- macro show(value) %}
{%- if value is mapping %}{
  {%- for name in value if not name.startswith('z') %}{{ name }}:{{ show(value[name]) }},{% endfor %}}
{%- elif value is sequence and value is not string %}[
  {%- for item in value %}{{ show(item) }},{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}{{ show(messages) }}{{ show(tools) }}";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn absent_fields_are_absent_in_every_format((kind, rows) in conversations(kinds(plain()))) {
        let dir = tempfile::tempdir().unwrap();
        let config = config_of_all(dir.path());
        let [lines, arrow, parquet] = ["a.jsonl", "a.arrow", "a.parquet"].map(|name| dir.path().join(name));
        fs::write(&lines, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        write_arrow(&arrow, &columns(&kind), &rows);
        write_parquet(&parquet, &columns(&kind), &rows);
        let expected = load(&[lines], &config).unwrap();
        for path in [arrow, parquet] {
            let data = load(std::slice::from_ref(&path), &config).unwrap();
            prop_assert_eq!(seen(&data), seen(&expected), "{}", path.display());
        }
    }

    #[test]
    fn odd_fields_change_nothing_unless_they_are_used((kind, rows) in conversations(
        kinds(prop_oneof![plain(), Just(Kind::Date), Just(Kind::Moment)])
            .prop_filter("an odd message", |kind| !kind.is_odd())
    )) {
        let dir = tempfile::tempdir().unwrap();
        let [lines, arrow, parquet] = ["a.jsonl", "a.arrow", "a.parquet"].map(|name| dir.path().join(name));
        let mut plain = rows.clone();
        plain.iter_mut().for_each(without_odd);
        fs::write(&lines, plain.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        write_arrow(&arrow, &columns(&kind), &rows);
        write_parquet(&parquet, &columns(&kind), &rows);
        let config = config_with(&dir.path().join("plain.jinja"), WITHOUT_ODD);
        let expected = load(&[lines], &config).unwrap();
        for path in [&arrow, &parquet] {
            let data = load(std::slice::from_ref(path), &config).unwrap();
            prop_assert_eq!(seen(&data), seen(&expected), "{}", path.display());
        }
        let config = config_of_all(dir.path());
        let [first, second] = [arrow, parquet].map(|path| {
            let fault = load(&[path], &config).err().map(|fault| fault.to_string());
            fault.map(|fault| fault.split_once("the chat template uses").unwrap().1.to_owned())
        });
        prop_assert_eq!(&first, &second);
        prop_assert_eq!(first.is_some(), rows.iter().any(|row| has_odd(row, false)));
        let names = ["column \"messages[].extra", "column \"tools[].parameters"];
        prop_assert!(first.is_none_or(|fault| names.iter().any(|name| fault.contains(name))));
    }
}
