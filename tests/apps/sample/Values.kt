/** Schemas of classes: their values, what a session fills, and what has none. */
package edge.runtime

import kotlinx.coroutines.runBlocking
import kotlinx.serialization.SerialName
import kotlinx.serialization.Serializable
import kotlinx.serialization.encodeToString
import kotlinx.serialization.json.Json

@Serializable
enum class Kind { @SerialName("at once") NOW, LATER }

@Serializable
data class Place(val city: String, val height: Double?)

@JvmInline
@Serializable
value class Name(val text: String)

@Serializable
data class Alarm(
    val minutes: Int,
    val kind: Kind,
    val name: Name,
    val places: List<Place>,
    val days: Map<String, Short> = emptyMap(),
    val loud: Boolean = true,
    @SerialName("count-down") val countDown: Long? = null,
)

@Serializable
data class Node(val next: Node?)

@Serializable
open class Open

fun main(arguments: Array<String>) = runBlocking {
    val more = arrayOf("minutes" to """{"minimum": 1, "maximum": 600}""")
    println("schema=" + jsonSchema<Alarm>(*more))
    println("tool=" + tool<Alarm>("set_alarm", "Sets an \"alarm\"", *more))
    val whole = Alarm(20, Kind.NOW, Name("é 😀"), listOf(Place("Rome", 21.5), Place("", null)), mapOf("mon" to 3), false, 7)
    for (value in listOf(whole, Alarm(1, Kind.LATER, Name(""), emptyList()))) {
        println("value=" + Json.encodeToString(value))
    }
    EdgeModel.open(arguments[0]).use { model ->
        for (seed in 1L..3L) {
            model.session(EdgeOptions(maxTokens = 300, temperature = 1.5, seed = seed)).use { session ->
                println("filled=${session.fill<Alarm>("Hi", *more).minutes in 1..600}")
            }
        }
    }
    for (schema in listOf({ jsonSchema<Node>() }, { jsonSchema(kotlinx.serialization.PolymorphicSerializer(Open::class)) })) {
        try {
            println("refused=${schema()}")
        } catch (refused: IllegalArgumentException) {
            println("refused=${refused.message}")
        }
    }
}
