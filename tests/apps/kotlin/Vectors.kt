/* Vectors of an exported encoder. Prints a line for each. */
package edge.runtime

import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.runBlocking

fun main(arguments: Array<String>) = runBlocking {
    val (path, text) = arguments
    EdgeModel.open(path).use { model ->
        val session = model.session()
        println("vector=${session.embed(text).toList()}")
        session.embed(listOf("another", text)).drop(1).forEach { println("vector=${it.toList()}") }
        try {
            session.answer(text).collect { }
        } catch (failed: EdgeException) {
            println("answer=${failed.message}")
        }
    }
}
