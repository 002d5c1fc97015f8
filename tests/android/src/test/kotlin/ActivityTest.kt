package com.example.chat

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
import edge.runtime.fromAssets
import java.io.File
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch
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
@Config(sdk = [35], qualifiers = "w411dp-h891dp-xhdpi")
@GraphicsMode(GraphicsMode.Mode.NATIVE) // draws
class ActivityTest {
    @Test fun conversationSurvivesRotationAndTheProcess() {
        val controller = Robolectric.buildActivity(ChatActivity::class.java).setup()
        val views = all(controller.get().window.decorView)
        val send = views.filterIsInstance<Button>().first()
        val question = views.filterIsInstance<EditText>().first()
        val conversation = views.filterIsInstance<TextView>().first { it !is Button && it !is EditText }
        assertTrue(run(30.0) { send.isEnabled })
        question.setText("Why is the sky blue?")
        send.performClick()
        assertTrue(run(60.0) { conversation.text.length > 80 })
        send.performClick()
        assertTrue(run(10.0) { send.text == "Send" })
        picture(controller.get().window.decorView, System.getProperty("picture"))
        val before = conversation.text.toString()
        controller.recreate() // rotation
        run(0.5) { false }
        fun shown() = all(controller.get().window.decorView).filterIsInstance<TextView>().map { it.text.toString() }
        assertTrue(before in shown())
        controller.pause().stop()
        run(3.0) { false }
        controller.destroy()
        val next = Robolectric.buildActivity(ChatActivity::class.java).setup()
        run(5.0) { all(next.get().window.decorView).filterIsInstance<Button>().first().isEnabled }
        val restored = all(next.get().window.decorView).filterIsInstance<TextView>()
        assertTrue(before in restored.map { it.text.toString() })
        assertEquals("Question", restored.filterIsInstance<EditText>().first().hint)
        picture(next.get().window.decorView, System.getProperty("picture") + ".restored.png")
        next.pause().stop().destroy()
    }

    @Test fun usageDoesNotWaitForAPrompt() {
        val model = EdgeModel.fromAssets(RuntimeEnvironment.getApplication())
        val session = model.session(EdgeOptions(temperature = 0.0, maxTokens = 20))
        val scope = MainScope()
        val job = scope.launch { session.answer("word ".repeat(6_000)).collect { } }
        run(0.3) { false }
        val begun = System.nanoTime()
        session.usage()
        assertTrue(System.nanoTime() - begun < 1_000_000_000 && !job.isCompleted) // without waiting for the prompt
        job.cancel()
        run(30.0) { job.isCompleted }
        scope.cancel()
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

    private fun picture(view: View, path: String) {
        val bitmap = Bitmap.createBitmap(view.width, view.height, Bitmap.Config.ARGB_8888)
        view.draw(Canvas(bitmap))
        File(path).outputStream().use { bitmap.compress(Bitmap.CompressFormat.PNG, 100, it) }
    }
}
