package edge.runtime

import kotlinx.coroutines.flow.Flow

/** A call of a tool, with its identifier in the conversation. [arguments]: a JSON object. */
public class ToolCall(public val id: String, public val name: String, public val arguments: String)

/**
 * States the functions of the app that answers may call, before the conversation begins: a JSON array in the form of OpenAI's
 * protocol; null: none. Throws EdgeException with [Status.UNSUPPORTED] if the model's chat template writes tools in a notation
 * that apps lack, [Status.BAD_ARGUMENT] for tools that are malformed.
 */
public suspend fun EdgeSession.tools(json: String?): Unit = change { Native.tools(it, json?.encodeToByteArray()) }

/**
 * What the next and later answers may call: auto, none, required, or the name of the one function that they must call. Calls that
 * must be made, and those of tools that are `strict`, match their schemas. [parallel]: several calls may follow each other.
 */
public suspend fun EdgeSession.choose(choice: String, parallel: Boolean = true): Unit = change {
    require('\u0000' !in choice) { "the choice contains the character U+0000" }
    Native.choose(it, choice.encodeToByteArray() + 0, if (parallel) 1 else 0)
}

/** The calls of the last answer, whose [EdgeSession.finish] then is [Finish.TOOL_CALLS]. */
public suspend fun EdgeSession.calls(): List<ToolCall> = change { session ->
    List(Native.calls(session)) { index ->
        val texts = Array(3) { field -> Native.call(session, index, field).decodeToString() }
        ToolCall(texts[0], texts[1], texts[2])
    }
}

/** The answer to the [results] of the last answer's calls, one for each, in their order. */
public suspend fun EdgeSession.answerResults(results: List<String>): Flow<Piece> {
    results.forEach { append(Role.RESULT, it) }
    return answer()
}
