//! Tokenizers of SentencePiece, of the kind that merges pairs, as a `tokenizer.json`.
//!
//! Such a tokenizer has pieces with scores and no list of merges: of all neighbours whose joined text is a piece, those
//! with the best score are joined first. As merges these are all splits of each piece into two, in the order of the
//! scores of the pieces.

use std::cmp::Reverse;
use std::collections::HashMap;

use serde_json::{Value as Json, json};

/// The sign of a blank within pieces.
const BLANK: &str = "\u{2581}";
/// Bytes of a piece beyond which a file is wrong or hostile: each is tried as the end of a part.
const MAX_PIECE: usize = 1 << 12;

const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const ADDED: i64 = 4;
const BYTE: i64 = 6;

/// A token, at the place of its id.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Its text.
    pub text: &'a str,
    /// The higher, the sooner it is put together.
    pub score: f64,
    /// 2: the unknown one, 3: a control token, 4: one that the user added, 6: a byte, written `<0x0A>`.
    pub kind: i64,
}

/// The text of a `tokenizer.json`. `unknown` is the id of text that no piece has, `begins_with_space` puts a blank
/// before a text, and with `strips` control tokens take the blanks behind them along, but for those that begin or end a
/// document.
pub fn tokenizer(
    pieces: &[Piece<'_>],
    unknown: Option<usize>,
    begins_with_space: bool,
    strips: bool,
) -> Result<Json, String> {
    if let Some(long) = pieces.iter().find(|piece| piece.text.len() > MAX_PIECE) {
        return Err(format!("a token of {} bytes; expected at most {MAX_PIECE}", long.text.len()));
    }
    let unknown = unknown.or_else(|| pieces.iter().position(|piece| piece.kind == UNKNOWN));
    let unknown = unknown.and_then(|id| pieces.get(id)).map(|piece| piece.text);
    let vocab: serde_json::Map<String, Json> =
        pieces.iter().enumerate().map(|(id, piece)| (piece.text.to_string(), json!(id))).collect();
    let added = pieces.iter().enumerate().filter(|(_, piece)| matches!(piece.kind, CONTROL | ADDED));
    let added: Vec<Json> = added
        .map(|(id, piece)| {
            let document = matches!(piece.text, "<s>" | "<|endoftext|>");
            json!({
                "id": id, "content": piece.text, "special": piece.kind == CONTROL, "single_word": false,
                "lstrip": false, "rstrip": strips && !document, "normalized": false,
            })
        })
        .collect();
    let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let mut normalizers = vec![replace(" ", BLANK)];
    let mut decoders = vec![replace(BLANK, " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    if begins_with_space {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": BLANK }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": merges(pieces),
        },
    }))
}

/// Pairs of pieces that make a piece, in the order in which they are joined.
fn merges<'a>(pieces: &[Piece<'a>]) -> Vec<[&'a str; 2]> {
    let ids: HashMap<&str, usize> = pieces.iter().enumerate().map(|(id, piece)| (piece.text, id)).collect();
    let mut found = Vec::new();
    for piece in pieces.iter().filter(|piece| !matches!(piece.kind, UNKNOWN | CONTROL | BYTE)) {
        let splits = piece.text.char_indices().skip(1).map(|(at, _)| piece.text.split_at(at));
        let mut own: Vec<_> = splits.filter_map(|(a, b)| Some((ids.get(a)?, ids.get(b)?, [a, b]))).collect();
        own.sort_by_key(|(a, b, _)| (**a, **b));
        found.extend(own.into_iter().map(|(.., pair)| (piece.score, pair)));
    }
    let length = |text: &str| Reverse(text.chars().count());
    found.sort_by(|(score, [a, b]), (other, [c, d])| {
        other.total_cmp(score).then_with(|| (length(a), length(b)).cmp(&(length(c), length(d))))
    });
    found.into_iter().map(|(_, pair)| pair).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::causal_lm::Tokenizer;

    fn pieces() -> Vec<Piece<'static>> {
        let mut pieces = vec![
            Piece { text: "<unk>", score: 0.0, kind: UNKNOWN },
            Piece { text: "<s>", score: 0.0, kind: CONTROL },
            Piece { text: "<end>", score: 0.0, kind: CONTROL },
        ];
        pieces.extend(["<0x0A>", "<0xC3>", "<0xA9>"].map(|text| Piece { text, score: 0.0, kind: BYTE }));
        // The best score first, as SentencePiece learns them; characters last.
        let learnt = ["he", "ll", "\u{2581}he", "hell", "llo", "\u{2581}", "h", "e", "l", "o"];
        pieces.extend(learnt.iter().enumerate().map(|(i, text)| Piece { text, score: -(i as f64), kind: 1 }));
        pieces
    }

    fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        tokenizer.encode(text).unwrap().into_iter().map(|id| tokenizer.token(id).unwrap()).collect()
    }

    #[test]
    fn neighbours_with_the_best_score_are_joined_first() {
        let json = tokenizer(&pieces(), None, false, false).unwrap();
        let tokenizer = Tokenizer::parse(json.to_string().as_bytes()).unwrap();
        assert_eq!(tokens(&tokenizer, "hello"), ["hell", "o"]);
        assert_eq!(tokens(&tokenizer, "llo hell<end>"), ["llo", "\u{2581}he", "ll", "<end>"]);
        // Bytes of text that no piece has; text that even they lack is unknown.
        assert_eq!(tokens(&tokenizer, "\n\u{e9}z"), ["<0x0A>", "<0xC3>", "<0xA9>", "<unk>"]);
        let ids = tokenizer.encode("he \u{e9} o").unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), "he \u{e9} o");
    }

    #[test]
    fn a_blank_may_stand_before_every_text_and_is_taken_away_again() {
        let json = tokenizer(&pieces(), None, true, true).unwrap();
        let tokenizer = Tokenizer::parse(json.to_string().as_bytes()).unwrap();
        assert_eq!(tokens(&tokenizer, "hell"), ["\u{2581}he", "ll"]);
        assert_eq!(tokenizer.decode(&tokenizer.encode("hell").unwrap()).unwrap(), "hell");
        assert_eq!(tokens(&tokenizer, "<end> hell"), ["<end>", "\u{2581}he", "ll"], "the blank belongs to the token");
    }

    #[test]
    fn every_split_into_two_pieces_is_a_merge() {
        let found = merges(&pieces());
        assert_eq!(found[..3], [["h", "e"], ["l", "l"], ["\u{2581}", "he"]]);
        assert!(found.contains(&["he", "ll"]) && found.contains(&["ll", "o"]));
        assert_eq!(found.len(), 5);
    }
}
