package com.example.chat

import android.content.ComponentCallbacks2
import android.graphics.Bitmap
import android.graphics.Canvas
import android.os.Looper
import android.view.View
import android.view.ViewGroup
import android.widget.Button
import android.widget.EditText
import android.widget.TextView
import edge.runtime.EdgeModel
import edge.runtime.EdgeOptions
import edge.runtime.Finish
import edge.runtime.fromAssets
import edge.runtime.trimInBackground
import java.io.File
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.cancel
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.launch
import kotlinx.coroutines.runBlocking
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.Robolectric
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import org.robolectric.annotation.GraphicsMode

@RunWith(RobolectricTestRunner::class)
@Config(qualifiers = "w411dp-h891dp-xhdpi")
@GraphicsMode(GraphicsMode.Mode.NATIVE) // draws
class ActivityTest {
    @Test fun conversationSurvivesCancelRotationTrimAndTheProcess() {
        val controller = Robolectric.buildActivity(ChatActivity::class.java).setup()
        fun shown() = all(controller.get().window.decorView)
        fun send() = shown().filterIsInstance<Button>().first()
        fun texts() = shown().filterIsInstance<TextView>().filter { it !is Button && it !is EditText }.map { "${it.text}" }
        fun ask(question: String) {
            shown().filterIsInstance<EditText>().first().setText(question)
            send().performClick()
        }
        fun converse(question: String) = (1..5).any { // this model draws the end of its answer by chance
            val before = texts()[0].length + question.length
            ask(question)
            assertTrue(run(60.0) { send().text == "Send" })
            texts()[0].length > before + 10
        }
        assertTrue(run(30.0) { send().isEnabled })
        assertTrue(converse("Why is the sky blue?"))
        ask("And in the evening?")
        send().performClick()
        assertTrue(run(30.0) { send().text == "Send" })
        val before = texts()[0]
        controller.recreate() // rotation
        assertTrue(run(30.0) { texts()[0] == before })
        trim()
        assertTrue(converse("And at night?"))
        picture(controller.get().window.decorView, "activity.png")
        val said = texts()[0]
        controller.pause().stop()
        run(3.0) { false }
        controller.destroy()
        val next = Robolectric.buildActivity(ChatActivity::class.java).setup()
        assertTrue(run(30.0) { all(next.get().window.decorView).filterIsInstance<Button>().first().isEnabled })
        val restored = all(next.get().window.decorView).filterIsInstance<TextView>()
        assertTrue(said in restored.map { it.text.toString() })
        assertEquals("Question", restored.filterIsInstance<EditText>().first().hint)
        picture(next.get().window.decorView, "restored.png")
        next.pause().stop().destroy()
    }

    @Test fun trimGivesMemoryBackAndTheConversationGoesOn() {
        val application = RuntimeEnvironment.getApplication()
        EdgeModel.fromAssets(application).use { model ->
            val session = model.session(EdgeOptions(temperature = 0.0, maxTokens = 300, ignoreEos = true))
            val trimming = session.trimInBackground(application)
            runBlocking { session.answer("Why is the sky blue?").collect { } }
            val before = session.usage()
            trim()
            val after = session.usage()
            assertTrue("$before $after", after.kv < before.kv && after.rows in 1 until before.rows)
            assertTrue(runBlocking { session.answer("And at night?").toList() }.size > 1)
            assertEquals(Finish.LENGTH, session.finish)
            trimming.close()
        }
    }

    @Test fun usageDoesNotWaitForAPrompt() {
        val model = EdgeModel.fromAssets(RuntimeEnvironment.getApplication())
        val ran = generateSequence(6_000) { it * 4 }.take(5).any { words -> // a fast machine has run the first ones already
            val session = model.session(EdgeOptions(temperature = 0.0, maxTokens = 20))
            val scope = MainScope()
            val job = scope.launch { session.answer("word ".repeat(words)).collect { } }
            run(0.3) { false }
            val begun = System.nanoTime()
            session.usage()
            assertTrue(System.nanoTime() - begun < 1_000_000_000) // without waiting for the prompt
            val runs = !job.isCompleted
            job.cancel()
            run(30.0) { job.isCompleted }
            scope.cancel()
            runs
        }
        assertTrue(ran)
        model.close()
    }

    /** Lets the main thread's messages run until [done], for so many seconds at most. */
    private fun run(seconds: Double, done: () -> Boolean): Boolean {
        val end = System.nanoTime() + (seconds * 1e9).toLong()
        while (System.nanoTime() < end) {
            shadowOf(Looper.getMainLooper()).idle()
            if (done()) return true
            Thread.sleep(5)
        }
        return false
    }

    private fun all(view: View): List<View> =
        listOf(view) + if (view is ViewGroup) (0 until view.childCount).flatMap { all(view.getChildAt(it)) } else emptyList()

    /** As the system asks a process that it would end next. */
    @Suppress("DEPRECATION")
    private fun trim() = RuntimeEnvironment.getApplication().onTrimMemory(ComponentCallbacks2.TRIM_MEMORY_COMPLETE)

    private fun picture(view: View, name: String) {
        val bitmap = Bitmap.createBitmap(view.width, view.height, Bitmap.Config.ARGB_8888)
        view.draw(Canvas(bitmap))
        File(System.getProperty("pictures"), name).outputStream().use { bitmap.compress(Bitmap.CompressFormat.PNG, 100, it) }
    }
}
