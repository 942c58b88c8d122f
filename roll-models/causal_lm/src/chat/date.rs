//! The function `strftime_now` of chat templates: the present date as Python's `strftime` writes it.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The present date and time (UTC) as Python's `strftime` writes it with `format`. If `fixed` is given, a date such as
/// `2026-11-28`, it replaces the present date. Fails on a directive that is not known.
pub(super) fn strftime(format: &str, fixed: Option<&str>) -> Result<String, String> {
    let seconds = match fixed {
        Some(date) => parse(date).ok_or_else(|| format!("expected a date as 2026-11-28, found `{date}`"))? * 86_400,
        None => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs() as i64),
    };
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    // 1970-01-01 was a Thursday, number 4 of `DAYS`.
    let weekday = DAYS[(days + 4).rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let hour_of_twelve = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(c) = letters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        // `%-d` is `%d` without the leading zero.
        let mut directive = letters.next();
        let has_leading_zero = directive != Some('-');
        if !has_leading_zero {
            directive = letters.next();
        }
        let two = |number: i64| if has_leading_zero { format!("{number:02}") } else { number.to_string() };
        out += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('H') => two(hour),
            Some('I') => two(hour_of_twelve),
            Some('M') => two(minute),
            Some('S') => two(second % 60),
            Some('j') => format!("{:03}", days - from_civil(year, 1, 1) + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z' | 'z') => String::new(),
            Some('%') => "%".into(),
            other => {
                return Err(format!("strftime_now: `%{}` is not known", other.map(String::from).unwrap_or_default()));
            }
        };
    }
    Ok(out)
}

/// Days since 1970 of a date such as `2026-11-28`; `None` if there is no such date.
fn parse(date: &str) -> Option<i64> {
    let mut parts = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let days = from_civil(year, month, day);
    (parts.next().is_none() && (1..=9999).contains(&year) && civil(days) == (year, month, day)).then_some(days)
}

/// Days from 0000-03-01 to 1970-01-01.
const DAYS_TO_1970: i64 = 719_468;
/// Days of an era: 400 years, after which the Gregorian calendar repeats.
const DAYS_OF_ERA: i64 = 146_097;

/// Days since 1970 of a date of the Gregorian calendar. Years are counted from March, so that leap days end them. This
/// is the algorithm `days_from_civil` of Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms".
fn from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - DAYS_TO_1970
}

/// Year, month (from 1) and day (from 1) of a number of days since 1970; the inverse of [`from_civil`].
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + DAYS_TO_1970;
    let (era, day_of_era) = (days.div_euclid(DAYS_OF_ERA), days.rem_euclid(DAYS_OF_ERA));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_are_written_as_python_writes_them() {
        let all = "%Y-%m-%d %y %e %-d %B %b %A %a %j %H:%M:%S %I %p %%";
        let expected = "2026-03-01 26  1 1 March Mar Sunday Sun 060 00:00:00 12 AM %";
        assert_eq!(strftime(all, Some("2026-03-01")).as_deref(), Ok(expected));
        assert_eq!(strftime("%A %j", Some("2024-12-31")).as_deref(), Ok("Tuesday 366"));
        assert!(strftime("%Q", None).is_err_and(|problem| problem.contains("%Q")));
        assert!(strftime("%Y", Some("2026-02-30")).is_err_and(|problem| problem.contains("2026-02-30")));
        assert!(strftime("%Y", None).is_ok_and(|year| year.as_str() >= "2026"));
    }
}
