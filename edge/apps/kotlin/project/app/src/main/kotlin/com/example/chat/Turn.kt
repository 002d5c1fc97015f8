package com.example.chat

import kotlinx.serialization.Serializable

/** A part of the conversation on the screen. [fields]: of a form, its labels and values. */
@Serializable
data class Turn(val by: By, val text: String, val fields: Map<String, String> = emptyMap()) {
    enum class By { PERSON, MODEL, APP }
}

/** The arguments of the tool `set_timer`. */
@Serializable
data class Timer(val minutes: Int)

/** The form that an answer fills. */
@Serializable
data class Booking(val name: String, val people: Int, val day: Day, val outside: Boolean) {
    enum class Day { MONDAY, TUESDAY, WEDNESDAY, THURSDAY, FRIDAY, SATURDAY, SUNDAY }

    fun fields() = mapOf(
        "Name" to name,
        "People" to "$people",
        "Day" to day.name.lowercase().replaceFirstChar { it.uppercase() },
        "Outside" to if (outside) "yes" else "no",
    )
}

/** What the next question is for. [choice]: of the tools that its answer may call. */
enum class Mode(val choice: String) { CHAT("auto"), TIMER("set_timer"), FORM("none") }

/** Colors row by row, 0xAARRGGBB, of an upright picture. */
class Picture(val colors: IntArray, val width: Int, val height: Int)

/** All that is shown. */
data class Screen(
    val phase: Phase = Phase.LOADING,
    val turns: List<Turn> = emptyList(),
    val status: String = "",
    val modes: List<Mode> = listOf(Mode.CHAT),
    val sees: Boolean = false,
    val hears: Boolean = false, // and answers nothing: a Whisper model
    val picture: Boolean = false, // waits for a question
) {
    enum class Phase { LOADING, READY, ANSWERING, FAILED }
}
