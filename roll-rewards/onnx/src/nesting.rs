//! Refuses files with deeply nested messages before a recursive parser reads them.
//!
//! A graph may contain an attribute that contains a graph, and a type may contain types. Each level costs a file a
//! dozen bytes and the parser a stack frame, and a stack overflow cannot be caught.

/// Deepest nesting that is parsed. Real files are below 30.
const MAX_DEPTH: usize = 64;

/// Wire types of protobuf: how a field's value is encoded.
mod wire {
    pub const VARINT: u64 = 0;
    pub const FIXED64: u64 = 1;
    /// A length and as many bytes: text, a list of numbers, or a message.
    pub const LENGTH_DELIMITED: u64 = 2;
    pub const FIXED32: u64 = 5;
}

/// The messages of onnx.proto that can contain themselves, directly or indirectly, and those that lead to them.
#[derive(Clone, Copy)]
enum Message {
    Model,
    Training,
    Function,
    Graph,
    Node,
    Attribute,
    ValueInfo,
    Type,
    /// A sequence or optional type: the message that holds the type of its elements.
    ElementType,
    MapType,
}

impl Message {
    /// The message in field `number`, if it is one of these messages. Comments have the names of the fields in
    /// onnx.proto.
    fn field(self, number: u64) -> Option<Self> {
        Some(match (self, number) {
            (Self::Model, 7) => Self::Graph,           // graph
            (Self::Model, 20) => Self::Training,       // training_info
            (Self::Model, 25) => Self::Function,       // functions
            (Self::Training, 1 | 2) => Self::Graph,    // initialization, algorithm
            (Self::Function, 7) => Self::Node,         // node
            (Self::Function, 11) => Self::Attribute,   // attribute_proto
            (Self::Function, 12) => Self::ValueInfo,   // value_info
            (Self::Graph, 1) => Self::Node,            // node
            (Self::Graph, 11..=13) => Self::ValueInfo, // input, output, value_info
            (Self::Node, 5) => Self::Attribute,        // attribute
            (Self::Attribute, 6 | 11) => Self::Graph,  // g, graphs
            (Self::Attribute, 14 | 15) => Self::Type,  // tp, type_protos
            (Self::ValueInfo, 2) => Self::Type,        // type
            (Self::Type, 4 | 9) => Self::ElementType,  // sequence_type, optional_type
            (Self::ElementType, 1) => Self::Type,      // elem_type
            (Self::Type, 5) => Self::MapType,          // map_type
            (Self::MapType, 2) => Self::Type,          // value_type
            _ => return None,
        })
    }

    /// Whether the field `number` may have the wire type `wire_type`. The parser reads some fields by their defined
    /// type and ignores the file's wire type; without this check, a file could present one tree here and another to the
    /// parser.
    fn allows(self, number: u64, wire_type: u64) -> bool {
        match (self, number) {
            // floats, ints: one by one or packed.
            (Self::Attribute, 7 | 8) => true,
            // ir_version, model_version.
            (Self::Model, 1 | 5) => wire_type == wire::VARINT,
            // i, type.
            (Self::Attribute, 3 | 20) => wire_type == wire::VARINT,
            // key_type.
            (Self::MapType, 1) => wire_type == wire::VARINT,
            // since_version, status.
            (Self::Function, 2 | 3) => wire_type == wire::VARINT,
            // f.
            (Self::Attribute, 2) => wire_type == wire::FIXED32,
            // All other fields up to the greatest number that is used, 25, are texts and messages.
            (_, ..=25) => wire_type == wire::LENGTH_DELIMITED,
            _ => true,
        }
    }
}

/// A message that is still to be checked.
struct Pending<'a> {
    message: Message,
    bytes: &'a [u8],
    /// Number of messages around it.
    depth: usize,
}

/// Fails if the model in `bytes` is nested too deeply. Malformed bytes pass, because the parser refuses them.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let mut pending = vec![Pending { message: Message::Model, bytes, depth: 0 }];
    while let Some(Pending { message, bytes, depth }) = pending.pop() {
        if depth > MAX_DEPTH {
            return Err(format!("its graphs or types nest deeper than {MAX_DEPTH} levels"));
        }
        let mut rest = bytes;
        while let Some(field) = next_field(rest) {
            rest = field.rest;
            let (number, wire_type) = (field.number, field.wire_type);
            if !message.allows(number, wire_type) {
                return Err(format!("it is no ONNX model: its field {number} has the wire type {wire_type}"));
            }
            if let (Some(message), Some(bytes)) = (message.field(number), field.delimited) {
                pending.push(Pending { message, bytes, depth: depth + 1 });
            }
        }
    }
    Ok(())
}

/// A field of a message.
struct Field<'a> {
    number: u64,
    wire_type: u64,
    /// The value, if it is length-delimited.
    delimited: Option<&'a [u8]>,
    /// The bytes after the field.
    rest: &'a [u8],
}

/// Reads the first field; `None` at the end, and if the bytes are malformed.
fn next_field(bytes: &[u8]) -> Option<Field<'_>> {
    let (tag, value) = varint(bytes)?;
    let (number, wire_type) = (tag >> 3, tag & 7);
    let (delimited, rest) = match wire_type {
        wire::VARINT => (None, varint(value)?.1),
        wire::FIXED64 => (None, value.get(8..)?),
        wire::LENGTH_DELIMITED => {
            let (length, value) = varint(value)?;
            let (delimited, rest) = value.split_at_checked(usize::try_from(length).ok()?)?;
            (Some(delimited), rest)
        }
        wire::FIXED32 => (None, value.get(4..)?),
        _ => return None,
    };
    Some(Field { number, wire_type, delimited, rest })
}

/// Reads a number of up to ten bytes, seven bits each, the lowest first; also returns the bytes after it.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0u64;
    for (i, &byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(7 * i as u32).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[i + 1..]));
        }
    }
    None
}
