/**
 * JSON schemas of the app's own classes, for tools and for forms of answers. For apps with kotlinx.serialization
 * (`org.jetbrains.kotlinx:kotlinx-serialization-json` and its compiler plugin); others need not have it.
 */
package edge.runtime

import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.withContext
import kotlinx.serialization.ExperimentalSerializationApi
import kotlinx.serialization.KSerializer
import kotlinx.serialization.descriptors.PolymorphicKind
import kotlinx.serialization.descriptors.PrimitiveKind
import kotlinx.serialization.descriptors.SerialDescriptor
import kotlinx.serialization.descriptors.SerialKind
import kotlinx.serialization.descriptors.StructureKind
import kotlinx.serialization.json.Json
import kotlinx.serialization.json.JsonArray
import kotlinx.serialization.json.JsonObject
import kotlinx.serialization.json.JsonPrimitive
import kotlinx.serialization.json.buildJsonObject
import kotlinx.serialization.json.put
import kotlinx.serialization.serializer

/**
 * The JSON schema of a `@Serializable` class. Properties without a default value are required; others are not there unless they are
 * given. [more]: keys of the schemas of single properties, as JSON: `"minutes" to """{"minimum": 1, "description": "how
 * long"}"""`. Throws IllegalArgumentException for classes that no schema says: those of open hierarchies, and such that
 * contain themselves.
 */
public inline fun <reified T> jsonSchema(vararg more: Pair<String, String>): String =
    jsonSchema(serializer<T>(), *more)

/** For a class by its serializer, which Java has, too: `Timer.Companion.serializer()`. */
public fun jsonSchema(of: KSerializer<*>, vararg more: Pair<String, String>): String {
    val keys = more.associate { (name, json) -> name to Json.parseToJsonElement(json) as JsonObject }
    return schema(of.descriptor, keys, emptyList()).toString()
}

/** A function of the app that answers may call with the properties of [T], for [EdgeSession.tools]. */
public inline fun <reified T> tool(name: String, about: String, vararg more: Pair<String, String>): String =
    tool(name, about, jsonSchema<T>(*more))

/** With [parameters], a JSON schema. */
public fun tool(name: String, about: String, parameters: String): String = buildJsonObject {
    put("type", "function")
    val function = buildJsonObject {
        put("name", name)
        put("description", about)
        put("parameters", Json.parseToJsonElement(parameters))
    }
    put("function", function)
}.toString()

/** As `tools(String)`, of what [tool] makes; none: no tools. */
public suspend fun EdgeSession.tools(tools: List<String>): Unit =
    tools(tools.takeIf { it.isNotEmpty() }?.joinToString(",", "[", "]"))

/** The arguments as a value of the app. */
public inline fun <reified T> ToolCall.decoded(): T = Json.decodeFromString(serializer<T>(), arguments)

/**
 * The answer to [prompt] as a value: it is constrained to the schema of [T], and later ones are free. Throws
 * SerializationException if it was cut before its end.
 */
public suspend inline fun <reified T> EdgeSession.fill(prompt: String, vararg more: Pair<String, String>): T =
    fill(prompt, serializer<T>(), *more)

/** Of a class by its serializer. */
public suspend fun <T> EdgeSession.fill(prompt: String, of: KSerializer<T>, vararg more: Pair<String, String>): T {
    constrain(Form.JSON_SCHEMA, jsonSchema(of, *more))
    try {
        return Json.decodeFromString(of, answer(prompt).toList().joinToString(""))
    } finally {
        withContext(NonCancellable) { constrain(Form.FREE) }
    }
}

@OptIn(ExperimentalSerializationApi::class) // to read kinds
private fun schema(of: SerialDescriptor, more: Map<String, JsonObject>, outer: List<String>): JsonObject {
    val own = of.serialName.removeSuffix("?")
    require(own !in outer) { "$own contains itself, which schemas of classes lack" }
    val within = outer + own
    val form: JsonObject = when (val kind = of.kind) {
        PrimitiveKind.BOOLEAN -> type("boolean")
        PrimitiveKind.STRING -> type("string")
        PrimitiveKind.CHAR -> JsonObject(type("string") + sizes("minLength", 1, "maxLength", 1))
        PrimitiveKind.FLOAT, PrimitiveKind.DOUBLE -> type("number")
        PrimitiveKind.BYTE -> JsonObject(type("integer") + sizes("minimum", Byte.MIN_VALUE, "maximum", Byte.MAX_VALUE))
        PrimitiveKind.SHORT ->
            JsonObject(type("integer") + sizes("minimum", Short.MIN_VALUE, "maximum", Short.MAX_VALUE))
        PrimitiveKind.INT -> JsonObject(type("integer") + sizes("minimum", Int.MIN_VALUE, "maximum", Int.MAX_VALUE))
        PrimitiveKind.LONG -> JsonObject(type("integer") + sizes("minimum", Long.MIN_VALUE, "maximum", Long.MAX_VALUE))
        SerialKind.ENUM -> buildJsonObject { put("enum", names(of)) }
        StructureKind.LIST -> JsonObject(type("array") + ("items" to schema(of.getElementDescriptor(0), more, outer)))
        StructureKind.MAP ->
            JsonObject(type("object") + ("additionalProperties" to schema(of.getElementDescriptor(1), more, within)))
        StructureKind.CLASS, StructureKind.OBJECT ->
            if (of.isInline) schema(of.getElementDescriptor(0), more, outer) else objectSchema(of, more, within)
        is PolymorphicKind, SerialKind.CONTEXTUAL ->
            throw IllegalArgumentException("${of.serialName} is $kind, which schemas of classes lack")
    }
    if (!of.isNullable) return form
    return buildJsonObject { put("anyOf", JsonArray(listOf(form, type("null")))) }
}

@OptIn(ExperimentalSerializationApi::class)
private fun objectSchema(of: SerialDescriptor, more: Map<String, JsonObject>, within: List<String>) = buildJsonObject {
    val properties = (0 until of.elementsCount).associate { index ->
        val name = of.getElementName(index)
        name to JsonObject(schema(of.getElementDescriptor(index), more, within) + (more[name] ?: emptyMap()))
    }
    put("type", "object")
    put("properties", JsonObject(properties))
    val required = (0 until of.elementsCount).filterNot { of.isElementOptional(it) }
    put("required", JsonArray(required.map { JsonPrimitive(of.getElementName(it)) }))
    put("additionalProperties", false)
}

@OptIn(ExperimentalSerializationApi::class)
private fun names(of: SerialDescriptor) =
    JsonArray((0 until of.elementsCount).map { JsonPrimitive(of.getElementName(it)) })

private fun type(name: String) = JsonObject(mapOf("type" to JsonPrimitive(name)))

private fun sizes(least: String, from: Number, most: String, to: Number) =
    mapOf(least to JsonPrimitive(from), most to JsonPrimitive(to))
